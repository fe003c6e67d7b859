"""Files of measurements that nobody has seen: whatever they hold, every row is scored, skipped with a reason or said to have
failed, and the others are scored all the same."""

import os
from collections import Counter
from pathlib import Path

import pytest

from planner.accuracy import planned
from planner.accuracy.planned import RANKED, STEP, Job, score_jobs
from planner.accuracy.report import as_json, as_text, summarise
from planner.accuracy.rows import Scored, Skip, read_csv
from planner.accuracy.runs import run_of
from planner.accuracy.score import score_folder
from planner.accuracy.steps import Predictor
from planner.cli import main

STEP_ROW = {
    "row_id": "r1", "group": "g", "framework": "torchtitan", "model": "llama", "arch": "dense", "layers": "4", "hidden": "256",
    "ffn": "512", "heads": "8", "kv_heads": "8", "vocab": "1024", "gpu": "H100-SXM-80GB", "gpus": "4", "dp": "1", "fsdp": "4",
    "tp": "1", "pp": "1", "zero": "3", "micro_batch": "2", "global_batch": "8", "seq": "128", "precision": "bf16",
    "ac_policy": "full", "compile": "True", "step_time_s": "0.01",
}  # fmt: skip
RANKED_ROW = {
    "gpus": "4", "global_batch": "8", "micro_batch": "2", "hidden": "256", "heads": "8", "layers": "4", "seq": "128", "tp": "2",
    "dp": "2", "pp": "1", "iter_ms": "10",
}  # fmt: skip


def table(*rows: dict[str, str]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return "\n".join([",".join(names), *(",".join(row.get(name, "") for name in names) for row in rows)])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plans are not made: every run takes 10 ms and 1 GiB. -> what was asked"""
    asked: list[str] = []

    def step_us(self: Predictor, run: object) -> float:
        asked.append(str(run))
        return 10_000.0

    monkeypatch.setattr(Predictor, "step_us", step_us)
    return asked


def test_a_byte_order_mark_spaces_and_more_columns_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("\ufeffm, n ,mood,\r\n1, 2,fine,x,y,z\r\n\r\n3,4\r\n".encode())
    assert [(row["m"], row["n"]) for row in read_csv(path, ("m", "n"))] == [("1", "2"), ("3", "4")]


def test_a_quoted_field_may_have_commas_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('m,note\n1,"two, and\nthree"\n2,\n')
    assert [row["note"] for row in read_csv(path, ("m",))] == ["two, and\nthree", ""]


@pytest.mark.parametrize(
    ("name", "text", "reasons"),
    [
        ("gemm_tpu_bf16", "m,n,k,latency_us\n1,2,3,4", {"no hardware profile for tpu": 1}),
        ("gemm_h100_int4", "m,n,k,latency_us\n1,2,3,4", {"no matmuls of int4": 1}),
        ("gemm_h200_bf16", "m,n,k,latency_us\n1,,3,4\n1,2,x,4\n1,2,3,0\n1,2,3,nan\n1,2,inf,4\n8,8,8,4", {
            "n is not stated": 1, "k is not a number": 2, "latency_us is not over 0": 1, "latency_us is not stated": 1, "": 1,
        }),
        ("attention_fwd_b200", "batch,seq,q_heads,kv_heads,head_dim,latency_us\n1,2048,8,8,96,50\n1,-1,8,8,96,50", {
            "": 1, "seq is not over 0": 1,
        }),
        ("membound_h100", "latency_us,bytes_read_plus_written\n1,\n10,1000", {"bytes_read_plus_written is not stated": 1, "": 1}),
        ("collectives", "gpu,gpus,collective,size_bytes,time_us\nH100-SXM,8,all_reduce,1e6,50\nH100-SXM,16,all_reduce,1e6,50\n"
         "H100-SXM,1,all_reduce,1e6,50\nH100-SXM,2.5,all_reduce,1e6,50\nH100-SXM,8,broadcast,1e6,50\nMI300X,8,all_gather,1e6,5", {
            "": 1, "nodes is not stated": 1, "one rank has nobody to exchange with": 1, "gpus is not a whole number": 1,
            "no collective 'broadcast'": 1, "no hardware profile for MI300X": 1,
        }),
        ("attention_fa_figures", "gpu,library,phase,head_dim,causal,seq,total_tokens,tflops\nH100,FA9,fwd,64,1,512,16384,300\n"
         "H100,FA2,sideways,64,1,512,16384,300", {"": 1, "phase 'sideways' is unknown": 1}),
    ],
)  # fmt: skip
def test_rows_of_kernels_and_links(tmp_path: Path, name: str, text: str, reasons: dict[str, int]) -> None:
    (tmp_path / f"{name}.csv").write_text(text)
    found = score_folder(tmp_path)
    assert (found.unknown_files, found.unreadable) == ((), ())
    assert Counter(row.skipped for row in found.rows) == reasons
    assert not any(row.failed for row in found.rows)
    as_text(found.rows, ())


@pytest.mark.parametrize("left_out", ["arch", "kv_heads", "dp", "tp", "micro_batch", "group", "framework", "sp", "row_id"])
def test_a_run_is_understood_without_what_follows_from_the_rest(left_out: str) -> None:
    """`arch` from the number of parameters, degrees and batches from each other."""
    row = STEP_ROW | {"params_B": f"{(4 * (4 * 256**2 + 3 * 256 * 512) + 2 * 1024 * 256) / 1e9}", "grad_accum": "1"}
    whole = run_of(row)
    assert run_of({name: value for name, value in row.items() if name != left_out}) == whole


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arch": "", "params_B": "8"}, "no builder for models of kind unstated"),
        ({"arch": "hybrid-mamba"}, "no builder for models of kind hybrid-mamba"),
        ({"precision": "fp8"}, "precision is not bf16 but fp8"),
        ({"precision": ""}, "precision is not bf16 but unstated"),
        ({"layers": "0"}, "layers is not over 0"),
        ({"layers": "3.5"}, "layers is not a whole number"),
        ({"heads": "many"}, "heads is not a number"),
        ({"fsdp": "", "dp": "", "tp": ""}, "tp is not stated"),
        ({"gpu": "H800"}, "no hardware profile for H800"),
        ({"vocab": ""}, "vocab is not stated"),
        ({"pp": "2"}, "pipeline stages"),
        ({"ac_policy": "every third moon"}, "recompute policy that plans do not have"),
    ],
)
def test_what_is_not_understood_says_why(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        run_of(STEP_ROW | changed)


def test_half_precisions_are_one(quick: list[str]) -> None:
    runs = {run_of(STEP_ROW | {"precision": name}) for name in ("bf16", "BF16", "bfloat16", "fp16", "mixed bf16", "amp_bf16")}
    assert len(runs) == 1


def test_a_row_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step_us(self: Predictor, run: object) -> float:
        if "seq=77" in str(run):
            raise ZeroDivisionError("a fault of our own\nwith details")
        return 10_000.0

    monkeypatch.setattr(Predictor, "step_us", step_us)
    rows = [STEP_ROW | {"seq": seq, "row_id": f"r{seq}"} for seq in ("64", "77", "128")]
    (tmp_path / "e2e_training_new.csv").write_text(table(*rows))
    found = score_folder(tmp_path, workers=0)
    assert [bool(row.failed) for row in found.rows] == [False, True, False]
    assert [line.failed for line in summarise(found.rows)] == [1, 0]
    text = as_text(found.rows, ())
    assert "FAILED: e2e_training_new.csv line 3 (e2e_training_new.csv): ZeroDivisionError: a fault of our own" in text
    assert as_json(found.rows, ())["failed"][0]["error"] == "ZeroDivisionError: a fault of our own"


def test_rows_without_time_are_skipped_and_time_follows_from_tokens(tmp_path: Path, quick: list[str]) -> None:
    """8 sequences of 128 tokens on 4 GPUs at 25,600 tokens per second each take 10 ms."""
    bare = {name: value for name, value in STEP_ROW.items() if name != "step_time_s"}
    (tmp_path / "e2e_training.csv").write_text(table(bare, bare | {"tokens_per_s_per_gpu": "25600"}))
    without, derived = score_folder(tmp_path).rows
    assert without.skipped == "no time stated"
    assert derived.measured == pytest.approx(10_000) and derived.error == pytest.approx(0)


def test_time_runs_out_with_the_most_telling_rows_done(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 5.0, 5.0])
    unstated = Job(kind=STEP, file="e", line=2, row=STEP_ROW | {"ac_policy": ""})
    stated, again = Job(kind=STEP, file="e", line=3, row=STEP_ROW), Job(kind=STEP, file="e", line=4, row=STEP_ROW | {"seq": "64"})
    told = planned._Told(3, print)
    monkeypatch.setattr(planned, "_Told", lambda *args: told)
    monkeypatch.setattr(planned.time, "monotonic", lambda: next(clock, 20.0))
    found = score_jobs([unstated, stated, again], workers=0, limit_s=10)
    assert [row.skipped for row in found] == ["not reached within the time limit", "", ""]


@pytest.mark.slow
def test_processes_give_what_one_gives() -> None:
    jobs = [Job(kind=STEP, file="e", line=n, row=STEP_ROW | {"seq": str(64 * n)}) for n in (1, 2, 3)]
    jobs += [Job(kind=RANKED, file="v", line=1, row=RANKED_ROW)]
    alone, shared = score_jobs(jobs, workers=0), score_jobs(jobs, workers=2)
    assert shared == alone and all(row.predicted for row in alone)


class Killer(Job):
    """A row that no process survives."""

    def score(self, predictor: Predictor) -> Scored:
        os._exit(7)


@pytest.mark.slow
def test_a_process_that_ends_is_replaced() -> None:
    rows = [STEP_ROW | {"pp": "2", "seq": str(n)} for n in (64, 65)]
    jobs = [Job(kind=STEP, file="e", line=n, row=row) for n, row in enumerate(rows)]
    killer = Killer(kind=STEP, file="k", line=1, row=STEP_ROW)
    first, last, killed = score_jobs([*jobs, killer], workers=2)
    assert first.skipped == last.skipped == "pipeline stages"
    assert killed.failed == "the process that planned it ended (7)"


def test_command_takes_time_limit_and_workers(tmp_path: Path, quick: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e2e_training.csv").write_text(table(STEP_ROW))
    (tmp_path / "memory_e2e.csv").write_text("row_id,memory_GiB\nr9,1\n")
    assert main(["accuracy", str(tmp_path), "--time-limit", "1", "--workers", "0"]) == 0
    text = capsys.readouterr().out
    assert "step time " in text and "skipped 1 of memory, recompute unstated: sizes of the model are not stated" in text
