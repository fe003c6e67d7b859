"""Names that sources give to hardware and networks -> the project's profiles."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.accuracy.rows import Skip
from planner.hardware import HardwareProfile, load_profile, profile_names

GPU_PATTERNS = (
    (r"^(gb200|gb300|h800|h20\b)", ""),
    (r"^h100.*(96 ?gb|meta|hbm2e)", "h100_hbm2e_500w"),
    (r"^h100([- _]?sxm.*)?$", "h100_sxm"),
    (r"^h200", "h200"),
    (r"^a100.*40 ?gb", "a100_40gb"),
    (r"^a100", "a100_80gb"),
    (r"^b200", "b200"),
)
FABRIC_PATTERNS = (
    (r"tcpxo", "tcpxo_8x200g"),
    (r"tcpx", "tcpx_4x200g"),
    (r"efa.*\b4x100g", "efa_4x100g"),
    (r"efa", "efa_32x100g"),
    (r"roce", "roce_8x400g"),
)


def profile_name(gpu: str) -> str:
    """`H100-SXM-80GB` -> `h100_sxm`. Raises Skip for hardware without a profile."""
    for pattern, name in GPU_PATTERNS:
        if re.search(pattern, gpu.strip().lower()):
            if name in profile_names():
                return name
            break
    raise Skip(f"no hardware profile for {gpu or 'an unnamed GPU'}")


def profile_for(gpu: str, fabric: str = "") -> HardwareProfile:
    """Profile of a GPU with a network. A label such as `IB 8x400G` sets the family and the bandwidth per GPU.

    Raises:
        Skip: unknown GPU, or a network of unknown kind or speed.
    """
    name = profile_name(gpu)
    if not fabric or fabric.lower() == "nvswitch":
        return load_profile(name)
    text = fabric.lower()
    if "unknown" in text:
        raise Skip("network of unknown kind")
    family = next((found for pattern, found in FABRIC_PATTERNS if re.search(pattern, text)), None)
    if family is None:
        if not re.search(r"\bib\b|infiniband|ndr|hdr", text):
            raise Skip(f"no fabric like {fabric!r}")
        family = "ib_8x400g"
    profile = load_profile(f"{name}+{family}")
    cards = re.search(r"(\d+)x(\d+)g", text)
    if cards is None:
        return profile
    per_gpu = int(cards[1]) * int(cards[2]) * 1e9 / 8 / profile.gpus_per_node
    return replace(profile, fabric=replace(profile.fabric, nic_bytes_per_s=per_gpu))
