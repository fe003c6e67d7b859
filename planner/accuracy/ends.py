"""Rows of whole training steps: time, memory, and ranking of plans for the same work."""

from __future__ import annotations

from collections.abc import Mapping

from planner.accuracy.rows import Fields, Scored, Skip, needed, number
from planner.accuracy.runs import run_of, vtrain_run
from planner.accuracy.steps import Predictor
from planner.units import GIB

STEP_COLUMNS = (
    "row_id", "source_url", "group", "framework", "model", "arch", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "gpu",
    "gpus", "dp", "fsdp", "tp", "sp", "cp", "pp", "zero", "micro_batch", "global_batch", "seq", "precision", "ac_policy",
    "compile", "step_time_s", "tokens_per_s_per_gpu", "reliability",
)  # fmt: skip
VTRAIN_COLUMNS = (
    "gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp", "iter_ms",
)  # fmt: skip
MEMORY_COLUMNS = ("row_id", "group", "model", "gpu", "gpus", "ac_policy", "memory_GiB")


def score_step(predictor: Predictor, row: Fields) -> Scored:
    """One measured step. Rows that do not say what is recomputed are planned as memory allows, and kept apart."""
    stated = bool(row["ac_policy"])
    category = "step time" if stated else "step time, recompute unstated"
    label = f"{row['row_id']} {row['model']} {row['gpu']} x {row['gpus']} fsdp {row['fsdp']} tp {row['tp']} seq {row['seq']}"
    measured = measured_us(row)
    if measured is None:
        return Scored(category=category, source=row["group"], label=label, measured=0.0, skipped="no time stated")
    try:
        predicted = predictor.step_us(run_of(row))
    except Skip as skip:
        return Scored(category=category, source=row["group"], label=label, measured=measured, skipped=str(skip))
    return Scored(category=category, source=row["group"], label=label, measured=measured, predicted=predicted)


def measured_us(row: Fields) -> float | None:
    """Stated, or from tokens per second. None if neither is there."""
    seconds = number(row, "step_time_s")
    if seconds is not None:
        return seconds * 1e6
    rate, batch, seq, gpus = (number(row, name) for name in ("tokens_per_s_per_gpu", "global_batch", "seq", "gpus"))
    if rate is None or batch is None or seq is None or gpus is None:
        return None
    return batch * seq / (rate * gpus) * 1e6


def score_vtrain(predictor: Predictor, row: Fields) -> Scored:
    """One of many plans for the same model and batch."""
    (measured,) = needed(row, "iter_ms")
    names = ("hidden", "heads", "layers", "seq", "gpus", "global_batch")
    family = "x".join(row[name] for name in names[:4])
    group = " ".join(f"{name} {row[name]}" for name in names)
    batch = f"{row['global_batch']}/{row['micro_batch']}"
    label = f"hidden {row['hidden']} layers {row['layers']} batch {batch} tp {row['tp']} dp {row['dp']}"
    category, multi = "step time of plans to rank", float(row["gpus"]) > 8
    category += ", several nodes" if multi else ", one node"
    try:
        predicted = predictor.step_us(vtrain_run(row))
    except Skip as skip:
        return Scored(category=category, source=family, label=label, measured=measured * 1e3, skipped=str(skip))
    return Scored(
        category=category, source=family, label=label, measured=measured * 1e3, predicted=predicted, group=f"{category}: {group}"
    )


def score_memory_row(predictor: Predictor, models: Mapping[str, Mapping[str, str]], row: Fields) -> Scored:
    """Peak memory of one device; sizes of the model are those of the step-time row of the same id. Sources report what PyTorch's
    allocator has reserved, without driver and communicators, unless their note says allocated."""
    stated = bool(row["ac_policy"])
    category = "memory" if stated else "memory, recompute unstated"
    (measured,) = needed(row, "memory_GiB")
    label = f"{row['row_id']} {row['model']} {row['gpu']} x {row['gpus']}"
    try:
        if row["row_id"] not in models:
            raise Skip("sizes of the model are not stated")
        memory = predictor.memory(run_of(models[row["row_id"]]))
    except Skip as skip:
        return Scored(category=category, source=row["group"], label=label, measured=measured, skipped=str(skip))
    found = memory.allocated_bytes if "allocated" in row.get("note", "").lower() else memory.cached_bytes
    return Scored(category=category, source=row["group"], label=label, measured=measured, predicted=found / GIB)
