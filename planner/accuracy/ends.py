"""Rows of whole training steps: time, memory, and ranking of plans for the same work."""

from __future__ import annotations

from dataclasses import replace

from planner.accuracy.facts import of_memory, of_ranked, of_run
from planner.accuracy.rows import Fields, Scored, Skip, counts, needed, number
from planner.accuracy.runs import Run, run_of, vtrain_run
from planner.accuracy.steps import GPUS_PER_NODE, Predictor
from planner.units import GIB

STEP_COLUMNS = ("gpu", "gpus", "layers", "hidden", "heads", "seq")
STEP_OPTIONAL = (
    "row_id", "source_url", "group", "framework", "model", "arch", "params_B", "ffn", "kv_heads", "vocab", "dp", "fsdp", "tp",
    "sp", "cp", "pp", "zero", "micro_batch", "global_batch", "grad_accum", "precision", "ac_policy", "compile", "step_time_s",
    "tokens_per_s_per_gpu", "reliability", "note",
)  # fmt: skip
VTRAIN_COLUMNS = (
    "gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp", "iter_ms",
)  # fmt: skip
MEMORY_COLUMNS = ("row_id", "memory_GiB")
MEMORY_OPTIONAL = ("source_url", "group", "model", "gpu", "gpus", "ac_policy", "note")


def source_of(row: Fields) -> str:
    return row.get("group") or row.get("source_url") or "unnamed source"


def score_step(predictor: Predictor, row: Fields) -> Scored:
    """One measured step. Rows that do not say what is recomputed are planned as memory allows, and kept apart."""
    category = "step time" if row["ac_policy"] else "step time, recompute unstated"
    degrees = " ".join(f"{name} {row[name]}" for name in ("dp", "fsdp", "tp") if row[name] not in ("", "1"))
    label = f"{row['row_id']} {row['model']} {row['gpu']} x {row['gpus']} {degrees} seq {row['seq']}"
    scored = Scored(category=category, source=source_of(row), label=label, measured=float("nan"))
    try:
        run = run_of(row)
        measured = measured_us(row, run)
        if measured is None:
            raise Skip("no time stated")
        run = predictor.settled(run)
        known = of_run(row, run, predictor.profile(run))
        return replace(scored, measured=measured, predicted=predictor.step_us(run), facts=known)
    except Skip as skip:
        return replace(scored, skipped=str(skip))


def measured_us(row: Fields, run: Run) -> float | None:
    """Stated, or from tokens per second. None if neither is there."""
    if number(row, "step_time_s") is not None:
        return needed(row, "step_time_s")[0] * 1e6
    if number(row, "tokens_per_s_per_gpu") is None:
        return None
    (rate,) = needed(row, "tokens_per_s_per_gpu")
    return run.batch * run.accumulation * run.seq / (rate * run.mesh.num_devices) * 1e6


def score_vtrain(predictor: Predictor, row: Fields) -> Scored:
    """One of many plans for the same model and batch."""
    (measured,), (gpus,) = needed(row, "iter_ms"), counts(row, "gpus")
    names = ("hidden", "heads", "layers", "seq", "gpus", "global_batch")
    family = "x".join(row[name] for name in names[:4])
    group = " ".join(f"{name} {row[name]}" for name in names)
    batch = f"{row['global_batch']}/{row['micro_batch']}"
    label = f"hidden {row['hidden']} layers {row['layers']} batch {batch} tp {row['tp']} dp {row['dp']}"
    category = f"step time of plans to rank, {'several nodes' if gpus > GPUS_PER_NODE else 'one node'}"
    try:
        run = vtrain_run(row)
        predicted, known = predictor.step_us(run), of_ranked(run, predictor.profile(run))
    except Skip as skip:
        return Scored(category=category, source=family, label=label, measured=measured * 1e3, skipped=str(skip))
    return Scored(
        category=category, source=family, label=label, measured=measured * 1e3, predicted=predicted, facts=known,
        group=f"{category}: {group}",
    )  # fmt: skip


def score_memory_row(predictor: Predictor, model: Fields | None, row: Fields) -> Scored:
    """Peak memory of one device; `model` is the step-time row of the same id. Sources report what PyTorch's allocator has
    reserved, without driver and communicators, unless their note says allocated."""
    category = "memory" if row["ac_policy"] else "memory, recompute unstated"
    label = f"{row['row_id']} {row['model']} {row['gpu']} x {row['gpus']}"
    scored = Scored(category=category, source=source_of(row), label=label, measured=float("nan"))
    try:
        scored = replace(scored, measured=needed(row, "memory_GiB")[0])
        if model is None:
            raise Skip("sizes of the model are not stated")
        run = predictor.settled(run_of(model))
        memory = predictor.memory(run)
        scored = replace(scored, facts=of_memory(row, run))
    except Skip as skip:
        return replace(scored, skipped=str(skip))
    found = memory.allocated_bytes if "allocated" in row["note"].lower() else memory.cached_bytes
    return replace(scored, predicted=found / GIB)
