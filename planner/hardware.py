"""Hardware profiles: what one kind of machine can do, every number with its unit and where it comes from.

A profile is a TOML file in `hardware_profiles/`; the network between its nodes is another, in `hardware_profiles/fabrics/`, and
any two go together. Each constant says where it comes from (`constants.py`); what a file must hold is in `hardware_reading.py`.
Rates are SI per second, times µs, sizes bytes.

A profile may name a `base`: what it does not state itself is taken from there, marked `derived` with its origin in the source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.constants import REQUIRED, Constant, read_toml
from planner.errors import InputError, UnknownHardwareError
from planner.hardware_changes import changed, joined_name, split_name

PROFILE_SCHEMA = 1
PROFILE_FOLDER = Path(__file__).parent / "hardware_profiles"
FABRIC_FOLDER = PROFILE_FOLDER / "fabrics"

Points = tuple[tuple[float, float], ...]
"""A curve as (x, y) pairs with rising x."""


@dataclass(frozen=True, kw_only=True)
class GemmConstants:
    """`t = ([(flops / (peak·e))^p + (bytes / (hbm·h))^p]^(1/p) + launch_us) · exp r(m, n, k)`: a smooth maximum of two bounds.

    Attributes:
        surface_m, surface_n, surface_k: where r, the log of measured over that formula, is known; linear in the logs between.
        surface: r [m][n][k].
        dtype_rate: dtype -> its rate over that of bf16, both as fractions of their own peaks; 1 where it is not stated.
    """

    compute_efficiency: float
    memory_efficiency: float
    sharpness: float
    launch_us: float
    surface_m: tuple[float, ...]
    surface_n: tuple[float, ...]
    surface_k: tuple[float, ...]
    surface: tuple[tuple[tuple[float, ...], ...], ...]
    dtype_rate: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LibraryConstants:
    """Attention of one library.

    Attributes:
        rate: of its blocks over that of the measured op.
        start, backward_start: work of a task beside its blocks, in blocks of head dim 128.
    """

    rate: float
    start: float
    backward_start: float


@dataclass(frozen=True, kw_only=True)
class AttentionConstants:
    """Fused attention is scheduled task by task: one task is a tile of queries of one head, walks over its blocks of keys, and
    runs on one multiprocessor.

        t = launch + longest task + max(tasks / multiprocessors - 1, 0) · mean task
        task = (start + number of blocks) blocks of time;  block = its flops / (peak / multiprocessors · efficiency)

    The rates are those of a measured op of several kernels; libraries run one kernel at rates of their own.

    Attributes:
        head_dims: where `efficiency` and `start` are known; linear in log head dim between, flat outside.
        efficiency: fraction of a multiprocessor's share of the peak inside a task [head_dim].
        start: work of a task of the measured op beside its blocks, in blocks of head dim 128 [head_dim].
        measured_launch_us, measured_passes: the kernels around attention in the measured op: µs, and how often they and attention
            move queries and keys (in sizes of one tensor of queries and one of keys).
        backward_flop_factor: FLOPs of backward over forward; backward_rate: rate of its blocks over that of forward ones.
        libraries: by name (`fa2`, `fa3`, `cudnn`); any other name is the measured op.
        library: the one that plans run with; launch_us: of its kernel.
    """

    multiprocessors: int
    head_dims: tuple[int, ...]
    efficiency: tuple[float, ...]
    start: tuple[float, ...]
    measured_launch_us: float
    measured_passes: float
    backward_flop_factor: float
    backward_rate: float
    libraries: Mapping[str, LibraryConstants]
    library: str
    launch_us: float


@dataclass(frozen=True, kw_only=True)
class PointwiseConstants:
    """`t = bytes / (hbm·efficiency) + launch_us`.

    Attributes:
        cached_rate: (bytes, fraction of the datasheet bandwidth) when a kernel runs again and again on the same tensors, which
            then stay in the cache. Benchmarks do that, training does not: plans are priced without it.
    """

    efficiency: float
    launch_us: float
    cached_rate: Points


@dataclass(frozen=True, kw_only=True)
class QuantiseConstants:
    """Scaling a matrix to fp8 before a matmul: its largest value, then the quotient. `t = bytes / (hbm·efficiency) + launch_us`
    with two reads of 2 bytes and one write of 1 byte per element."""

    efficiency: float
    launch_us: float


@dataclass(frozen=True, kw_only=True)
class ScanConstants:
    """Chunked scan of linear attention, forward:
    `t = launch_us + (round_us + chunk_us · ⌈seq/chunk⌉) · max(1, batch · heads / tasks)`.

    Chunks of one sequence follow each other; as many heads as there are `tasks` run at once. A causal convolution over few
    tokens moves its channels in and out once: `t = bytes / (hbm · convolution_efficiency) + convolution_launch_us`.
    """

    chunk: int
    launch_us: float
    round_us: float
    chunk_us: float
    tasks: float
    convolution_efficiency: float
    convolution_launch_us: float


@dataclass(frozen=True, kw_only=True)
class LaunchConstants:
    """Time of the issuing CPU thread: per operator in eager PyTorch, per kernel of a compiled program, per collective call."""

    eager_us: float
    compiled_us: float
    collective_us: float


@dataclass(frozen=True, kw_only=True)
class NodeConstants:
    """Collectives among GPUs of one node.

    Attributes:
        link_bytes_per_s: datasheet rate of one GPU into the switch, one direction.
        nvls_min_ranks: from this many ranks on an all-reduce of floats is reduced inside the switch; None: never.
        curves: per collective kind and rank count, (full bytes, µs). `all_reduce_ring` is what an all-reduce takes that the
            switch cannot reduce; without it reduce-scatter and all-gather are added.
    """

    link_bytes_per_s: float
    nvls_min_ranks: int | None
    curves: Mapping[str, Mapping[int, Points]]


@dataclass(frozen=True, kw_only=True)
class FabricConstants:
    """The network between nodes.

    Attributes:
        nic_bytes_per_s: datasheet rate of the network card that one GPU owns, one direction.
        efficiency: per collective kind, the reached fraction of it.
        start_up: per collective kind, (full bytes, µs) that two nodes need beyond bytes / bandwidth.
    """

    nic_bytes_per_s: float
    efficiency: Mapping[str, float]
    start_up: Mapping[str, Points]


@dataclass(frozen=True, kw_only=True, eq=False)
class HardwareProfile:
    """One kind of machine. Compare by `content_hash`.

    Attributes:
        peak_flop_per_s: dense datasheet peak per dtype name; float32 is the plain unit, never TF32.
        usable_bytes: device memory a program can have; reserve_bytes: what communication buffers and the driver take of it.
        sustained_clock: clock of hours of training over that of the short bursts measured; slows FLOP-bound time only.
        fabric_name: the network between nodes.
        constants: every constant by dotted name, with its provenance.
    """

    name: str
    fabric_name: str
    title: str
    peak_flop_per_s: Mapping[str, float]
    hbm_bytes_per_s: float
    hbm_bytes: int
    usable_bytes: int
    reserve_bytes: int
    gpus_per_node: int
    sustained_clock: float
    gemm: GemmConstants
    attention: AttentionConstants
    pointwise: PointwiseConstants
    quantise: QuantiseConstants
    scan: ScanConstants
    launch: LaunchConstants
    node: NodeConstants
    fabric: FabricConstants
    constants: Mapping[str, Constant]
    content_hash: str

    @property
    def default_budget_bytes(self) -> int:
        """Memory budget of a plan when the user names none."""
        return self.usable_bytes - self.reserve_bytes

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype. Raises UnknownHardwareError if the profile states none."""
        if dtype not in self.peak_flop_per_s:
            raise UnknownHardwareError(
                f"hardware profile {self.name} states no peak FLOP/s for {dtype}",
                hint=f"It has {', '.join(sorted(self.peak_flop_per_s))}; add [peak.{dtype}] to the profile.",
            )
        return self.peak_flop_per_s[dtype]

    def to_dict(self) -> dict[str, Any]:
        """The content of the TOML file: `from_dict` gives the same profile back."""
        tree: dict[str, Any] = {"schema": PROFILE_SCHEMA, "name": self.name, "title": self.title, "fabric_name": self.fabric_name}
        for key, constant in self.constants.items():
            *parents, last = key.split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[last] = constant.to_dict()
        return tree

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HardwareProfile:
        """Raises InputError naming the first key that is missing, unknown or without provenance."""
        from planner.hardware_reading import read_profile

        return read_profile(data)


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.toml")))


def fabric_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FABRIC_FOLDER.glob("*.toml")))


def load_profile(name: str) -> HardwareProfile:
    """A profile by name, `h100_sxm`, with the network that it names; `h100_sxm+roce_8x400g` is the same with another network,
    `h100_sxm@link=2` with changed fields (`hardware_changes.py`).

    Raises UnknownHardwareError listing what is known, InputError if a file is damaged or there is no such change.
    """
    machine, fabric, factors = split_name(name)
    if machine not in profile_names():
        raise UnknownHardwareError(f"unknown hardware {machine!r}", hint=f"Known: {', '.join(profile_names())}.")
    data = _with_base(read_toml(PROFILE_FOLDER / f"{machine}.toml"))
    default = data.get("fabric_name", "")
    fabric = fabric or default
    if fabric not in fabric_names():
        raise UnknownHardwareError(f"unknown fabric {fabric!r}", hint=f"Known: {', '.join(fabric_names())}.")
    whole = {**data, "fabric_name": fabric, "fabric": read_toml(FABRIC_FOLDER / f"{fabric}.toml")["fabric"]}
    whole["name"] = joined_name(machine, "" if fabric == default else fabric, factors)
    return HardwareProfile.from_dict(changed(whole, factors))


def _with_base(data: dict[str, Any]) -> dict[str, Any]:
    """The profile with what its base adds. A kind of collective with curves of its own takes none from the base."""
    if "base" not in data:
        return data
    base = _with_base(read_toml(PROFILE_FOLDER / f"{data['base']}.toml"))
    return {key: value for key, value in _merged(data, _as_derived(base, data["base"])).items() if key != "base"}


def _merged(own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        found[key] = _merged(value, base[key]) if both and not set(value) & set(REQUIRED) else value
    return found


def _as_derived(tree: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The same constants, said to come from another profile; their residuals belong to that one and are dropped."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and set(value) & set(REQUIRED):
            kept = {name: value[name] for name in REQUIRED if name in value}
            prefix = "" if value.get("kind") == "derived" else f"as {origin}: "
            found[key] = {**kept, "kind": "derived", "source": f"{prefix}{value.get('source', '')}"}
        else:
            found[key] = _as_derived(value, origin) if isinstance(value, dict) else value
    return found


def parse_profile(toml: str) -> HardwareProfile:
    try:
        return HardwareProfile.from_dict(tomllib.loads(toml))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the hardware profile is not TOML: {error}", hint="Check the line it names.") from error
