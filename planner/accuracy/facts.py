"""What is known, and what is assumed, about a row: short sentences that say why its prediction may be off.

They are facts of the row and of the profile alone, never of the measured value, so rows with the same sentence can be compared
with rows without it (`report.telling`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from planner.accuracy.rows import Fields, number
from planner.accuracy.runs import NETWORK_NOTE, Run
from planner.costing.collective import GroupShape
from planner.hardware import HardwareProfile

Facts = tuple[str, ...]
TILE = (128, 256)
"""Rows and columns of the result that a multiprocessor computes at once, in matmuls of usual size."""
HALF, SLIVER = 0.5, 0.25
"""Of all multiprocessors."""


def _borrowed(profile: HardwareProfile, what: str, *keys: str) -> list[str]:
    """Said if these constants were measured on another machine, or not at all."""
    kinds = {profile.constants[key].kind for key in keys if key in profile.constants}
    found = []
    if "derived" in kinds:
        found.append(f"{what} taken over from another machine")
    if "guess" in kinds:
        found.append(f"{what} guessed")
    return found


def of_gemm(profile: HardwareProfile, dtype: str, of: Mapping[str, np.ndarray]) -> list[Facts]:
    """How the tiles of the result fill the device, and whose surface it is."""
    common = _borrowed(profile, "matmul rates", "gemm.surface.log_residual")
    if dtype == "fp8":
        common += ["fp8: the surface of bf16"]
    tiles = np.ceil(of["m"] / TILE[0]) * np.ceil(of["n"] / TILE[1])
    turns = tiles / profile.attention.multiprocessors
    last = turns - np.floor(turns)
    odd = (of["n"] % 8 != 0) | (of["k"] % 8 != 0)
    found = []
    for m, n, k, fill, sliver, unaligned in zip(of["m"], of["n"], of["k"], turns, last, odd, strict=True):
        mine = list(common)
        if fill < HALF:
            mine.append("tiles for less than half of the multiprocessors" + (", long inner dim" if k >= 8 * max(m, n) else ""))
        elif 1 < fill < 4 and 0 < sliver < SLIVER:
            mine.append("a last turn of few tiles")
        if unaligned:
            mine.append("a dim that is no multiple of 8")
        found.append(tuple(mine))
    return found


def of_attention(profile: HardwareProfile, of: Mapping[str, np.ndarray]) -> list[Facts]:
    rule = profile.attention
    common = _borrowed(profile, "attention rates", *(f"attention.efficiency.d{d}" for d in rule.head_dims))
    tasks = of["batch"] * of["q_heads"] * np.maximum(of["seq"] / 128, 1.0)
    found = []
    for count, head_dim, seq in zip(tasks, of["head_dim"], of["seq"], strict=True):
        mine = list(common)
        if count <= rule.multiprocessors:
            mine.append("no more tiles of queries than multiprocessors")
        elif count <= 2 * rule.multiprocessors:
            mine.append("tiles of queries for one to two turns")
        if head_dim not in rule.head_dims:
            mine.append(f"head dim {head_dim:g}: between or beyond those measured")
        if seq < 128:
            mine.append("shorter than a tile of queries")
        found.append(tuple(mine))
    return found


def of_library(profile: HardwareProfile, library: str) -> Facts:
    known = library.lower() in profile.attention.libraries
    found = [] if known else [f"library {library} has no rate of its own: that of the measured op"]
    return (*_borrowed(profile, "library rates", f"attention.library_rate.{library.lower()}"), *found)


def of_bytes(profile: HardwareProfile, size: np.ndarray) -> list[Facts]:
    common = tuple(_borrowed(profile, "bandwidth", "pointwise.efficiency", "pointwise.cached_rate"))
    cached = [x for x, rate in profile.pointwise.cached_rate if rate > 1]
    low, high = (min(cached), max(cached)) if cached else (math.inf, 0.0)
    return [(*common, *(("stays in the cache when repeated",) if low <= x <= high else ())) for x in size]


def of_collective(row: Fields, profile: HardwareProfile, shape: GroupShape, timed_outside: bool) -> Facts:
    """Rank counts that were not measured, networks whose numbers are another's, and how the row was timed."""
    kind, found = row["collective"], []
    curves = profile.node.curves.get(kind, {})
    inside = shape.ranks if shape.nodes == 1 else shape.ranks_per_node
    if inside > 1 and inside not in curves:
        found.append(f"{inside} ranks of a node: between those measured")
    found += _borrowed(profile, "curves in a node", *(k for k in profile.constants if k.startswith(f"node.collective.{kind}.")))
    if shape.nodes > 1:
        keys = (f"fabric.efficiency.{kind}", f"fabric.start_up.{kind}")
        found += _borrowed(profile, f"network {profile.fabric_name} for {kind}", *keys)
        if shape.nodes > 2:
            found.append("more than two nodes: start-up grows with the logarithm")
    if timed_outside:
        found.append("timed around a blocking call: operator and launch are in it")
    if row["reliability"].lower() == "medium":
        found.append("source of medium reliability")
    return tuple(found)


def of_scan(row: Fields, profile: HardwareProfile) -> Facts:
    found = _borrowed(profile, "scan constants", "scan.chunk_us", "scan.convolution_efficiency")
    if "num_k_heads" not in row:
        found.append("convolution of Mamba-2: rates of the one before gated delta nets")
    return tuple(found)


def of_run(row: Fields, run: Run, profile: HardwareProfile) -> Facts:
    """`run` as planned. What a row does not say is assumed; what it notes itself is repeated."""
    found = []
    if not row.get("ac_policy"):
        found.append(f"recompute not stated: {run.checkpoint} assumed, as memory allows")
    if not row.get("compile"):
        found.append(f"compiled or eager not stated: {'compiled' if run.compiled else 'eager'} assumed")
    if run.shards_parameters is False and run.zero == 0 and not row.get("zero"):
        found.append("sharding of the optimizer not stated: none assumed")
    if not row.get("sp") and run.mesh.num_devices > run.data_ranks:
        found.append("sequence parallelism not stated: assumed")
    if run.mesh.num_devices > profile.gpus_per_node:
        found.append(f"several nodes, network {_network(row, profile)}")
    found += _borrowed(profile, "clock of long runs", "clock.sustained")
    found += _borrowed(
        profile, f"attention rate ({profile.attention.library})", f"attention.library_rate.{profile.attention.library}"
    )
    if run.narrow_sums:
        found.append("gradients summed in 16 bits, by the framework's name")
    if run.hides_exchanges:
        found.append("exchanges of tensor parallelism run beside products, by the framework's name")
    if (number(row, "params_B") or 0) and row.get("arch", "") == "":
        found.append("kind of model not stated: dense, by its number of parameters")
    if row.get("reliability", "").lower() == "medium":
        found.append("source of medium reliability")
    if row.get("note"):
        found.append(f"note: {row['note'][:70]}")
    return tuple(found)


def _network(row: Fields, profile: HardwareProfile) -> str:
    return "as noted" if NETWORK_NOTE.search(row.get("note", "")) else f"not stated: {profile.fabric_name} assumed"


def of_ranked(run: Run, profile: HardwareProfile) -> Facts:
    found = ["vocabulary, recompute and dropout not stated: 51,200, full and by the library assumed"]
    if run.mesh.num_devices > profile.gpus_per_node:
        found.append(f"several nodes, network not stated: {profile.fabric_name} assumed")
        if run.mesh.num_devices // run.data_ranks > profile.gpus_per_node:
            found.append("tensor parallelism across nodes")
    if run.accumulation > 1 and run.batch == run.data_ranks:
        found.append("one sequence per micro-step")
    return tuple(found)


def of_memory(row: Fields, run: Run) -> Facts:
    found = []
    if not row.get("ac_policy"):
        found.append(f"recompute not stated: {run.checkpoint} assumed, as memory allows")
    if "allocated" not in row["note"].lower():
        found.append("reserved or allocated not stated: reserved assumed")
    if run.accumulation > 1 or run.has_master:
        found.append("gradients stand over micro-steps")
    if not run.compiled:
        found.append("eager: tensors inside a block as planned for fused kernels")
    return tuple(found)
