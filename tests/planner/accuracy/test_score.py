"""A small folder of measurements with known errors: what is read, skipped, scored and printed."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from planner.accuracy.labels import profile_for, profile_name
from planner.accuracy.report import as_json, as_text, rankings, summarise, telling
from planner.accuracy.rows import Scored, Skip
from planner.accuracy.score import score_folder
from planner.cli import main
from planner.costing.collective import GroupShape, group_curves
from planner.costing.compute import Kernels
from planner.costing.fusion import NO_TRAFFIC
from planner.errors import InputError
from planner.hardware import load_profile
from planner.redistribution import CollectiveKind
from planner.strategy import KernelShapes

COLLECTIVES = "source_url,gpu,nodes,gpus,collective,size_bytes,time_us,fabric,variant,reliability"


def gemm_us(m: int, n: int, k: int) -> float:
    dims = {"batch": np.array([1.0]), "m": np.array([float(m)]), "n": np.array([float(n)]), "k": np.array([float(k)])}
    kernel = KernelShapes("gemm", dims, dtype="bfloat16", out_dtype="bfloat16")
    return float(Kernels(load_profile("h100_sxm"), sustained=False).us(kernel, NO_TRAFFIC)[0])


def gather_us(size: int) -> float:
    curves = group_curves(load_profile("h100_sxm"), GroupShape(8, 1, 8))
    return float(curves.us(CollectiveKind.ALL_GATHER, np.array([size]))[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Matmuls 10 % and 30 % slower than predicted, one collective exact, one on unknown hardware, one file of nobody's."""
    shapes = ((256, 1024, 1024, 1.1), (512, 2048, 1024, 1.3))
    rows = [f"{m},{n},{k},{gemm_us(m, n, k) * slow}" for m, n, k, slow in shapes]
    (tmp_path / "gemm_h100_bf16.csv.gz").write_bytes(gzip.compress("\n".join(["m,n,k,latency_us", *rows]).encode()))
    size = 2**24
    lines = [
        f"one,H100-SXM-80GB,1,8,all_gather,{size},{gather_us(size)},NVSwitch,,high",
        f"one,TPU,1,8,all_gather,{size},10,NVSwitch,,high",
        f"two,H100-SXM-80GB,2,16,all_reduce,{size},100,carrier pigeon,,high",
        f"two,H100-SXM-80GB,2,16,all_reduce,{size},100,IB 8x400G,,low",
        "two,H100-SXM-80GB,2,16,all_reduce,,100,IB 8x400G,,high",
    ]
    (tmp_path / "collectives.csv").write_text("\n".join([COLLECTIVES, *lines]))
    (tmp_path / "diary.csv").write_text("day,mood\n1,good\n")
    (tmp_path / "notes.txt").write_text("not a table")
    return tmp_path


def test_errors_are_the_known_ones(folder: Path) -> None:
    found = score_folder(folder)
    lines = {line.category: line for line in summarise(found.rows)}
    gemm = lines["gemm bf16, m >= 128"]
    assert (gemm.rows, gemm.sources) == (2, 2)
    assert gemm.mean_pct == pytest.approx(100 * np.mean([1 - 1 / 1.1, 1 - 1 / 1.3]), abs=0.01)
    assert gemm.bias_pct == pytest.approx(-gemm.mean_pct)
    assert gemm.passes is False
    near = lines["collectives in a node, >= 1 MiB"]
    assert (near.rows, near.skipped, near.mean_pct, near.passes) == (1, 1, 0.0, True)
    assert found.unknown_files == ("diary.csv",)


def test_every_row_is_scored_or_has_its_reason(folder: Path) -> None:
    rows = score_folder(folder).rows
    assert len(rows) == 2 + 5
    reasons = {row.skipped for row in rows if row.predicted is None}
    assert reasons == {
        "no hardware profile for TPU", "no fabric like 'carrier pigeon'", "source marked as of low reliability",
        "size_bytes is not stated",
    }  # fmt: skip


def test_worst_rows_say_what_is_known_and_assumed(folder: Path) -> None:
    """The facts of a row are in the text and in JSON; what rows that err more have in common is told with both errors."""
    (folder / "gemm_a100_bf16.csv").write_text("m,n,k,latency_us\n128,256,65536,100\n8192,8192,8192,9000")
    rows = [*(f"1,{seq},4,4,128,{us}" for seq, us in ((1024, 66), (2048, 100), (4096, 170))), "64,1024,32,32,128,2850"]
    rows += ["64,2048,32,32,128,7950", "64,4096,32,32,128,25500"]
    (folder / "attention_fwd_h100.csv").write_text("\n".join(["batch,seq,q_heads,kv_heads,head_dim,latency_us", *rows]))
    scored = score_folder(folder)
    by_label = {row.label: row.facts for row in scored.rows}
    assert by_label["a100 128 x 256 x 65536"] == (
        "matmul rates taken over from another machine", "tiles for less than half of the multiprocessors, long inner dim",
    )  # fmt: skip
    assert by_label["h100 batch 64 seq 1024 heads 32/32 d128"] == ()
    few = "no more tiles of queries than multiprocessors"
    assert by_label["h100 batch 1 seq 4096 heads 4/4 d128"] == (few,)
    text = as_text(scored.rows, ())
    assert f"[{few}]" in text and f"why attention, seq >= 1024: 3 rows with '{few}' err " in text
    data = as_json(scored.rows, ())
    (why,) = [one for one in data["why"] if one["category"] == "attention, seq >= 1024"]
    assert why["fact"] == few and why["with_pct"] > 2 * why["without_pct"]
    assert data["worst"]["attention, seq >= 1024"][0]["facts"] == [few]


def test_facts_do_not_look_at_what_was_measured() -> None:
    """A fact that all rows have, or that errs no more, explains nothing."""
    rows = [
        Scored(category="c", source="s", label=str(n), measured=1.0, predicted=1.1 + 0.2 * (n < 4), facts=("all", *said))
        for n, said in enumerate([("bad",)] * 4 + [("good",)] * 4)
    ]
    assert [(one.fact, one.rows, one.with_pct, one.without_pct) for one in telling(rows, "c")] == [("bad", 4, 30.0, 10.0)]


def test_files_that_hold_nothing_measured_say_so(tmp_path: Path) -> None:
    (tmp_path / "memory_korthikanti_a100.csv").write_text("model,params_plus_optimizer_GiB\nGPT,45.56\n")
    (tmp_path / "moe_grouped_gemm_h100_bf16.csv").write_text("latency_us\n10\n")
    found = score_folder(tmp_path)
    assert found.unknown_files == () and all(row.skipped for row in found.rows)
    assert {row.category for row in found.rows} == {"memory by formula", "grouped matmul"}


def test_command_prints_table_reasons_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "MISSED" in text and "worst gemm bf16" in text and "not read: diary.csv" in text
    assert "skipped 1 of collectives in a node, >= 1 MiB: no hardware profile for TPU" in text
    assert main(["accuracy", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["categories"] == as_json(score_folder(folder).rows, ())["categories"]
    assert {line["category"] for line in data["categories"]} >= {"gemm bf16, m >= 128"}


def test_wrong_input_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        score_folder(tmp_path / "nowhere")
    (tmp_path / "collectives.csv").write_text("source_url,gpu\na,b\n")
    (tmp_path / "gemm_h100_bf16.csv").write_text("")
    (tmp_path / "membound_h100.csv.gz").write_bytes(b"no gzip")
    found = score_folder(tmp_path)
    assert not found.rows
    assert dict(found.unreadable)["collectives.csv"] == "collectives.csv has no column collective, gpus, size_bytes, time_us"
    assert dict(found.unreadable)["gemm_h100_bf16.csv"] == "gemm_h100_bf16.csv is empty"
    assert "cannot be read" in dict(found.unreadable)["membound_h100.csv.gz"]
    assert "not read: collectives.csv has no column" in as_text(found.rows, (), found.unreadable)


def test_empty_folder_gives_an_empty_table(tmp_path: Path) -> None:
    assert score_folder(tmp_path).rows == ()
    assert "category" in as_text((), ())


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("H100-SXM-80GB", "h100_sxm"),
        ("H100-SXM-96GB HBM2e 2.4TB/s 500W (Grand Teton)", "h100_hbm2e_500w"),
        ("H100-SXM (Meta dev)", "h100_hbm2e_500w"),
        ("H200-SXM (A3 Ultra assumed)", "h200"),
        ("A100-SXM-80GB", "a100_80gb"),
        ("A100-SXM-40GB", "a100_40gb"),
        ("B200-SXM", "b200"),
    ],
)
def test_gpu_labels(gpu: str, name: str) -> None:
    assert profile_name(gpu) == name


@pytest.mark.parametrize("gpu", ["GB200", "H800-SXM", "MI300X", ""])
def test_gpus_without_a_profile_are_skipped(gpu: str) -> None:
    with pytest.raises(Skip, match="no hardware profile"):
        profile_name(gpu)


def test_network_labels_set_family_and_bandwidth() -> None:
    assert profile_for("A100-SXM-80GB", "EFA 4x100G").fabric.nic_bytes_per_s == 4 * 100e9 / 8 / 8
    assert profile_for("A100-SXM-80GB", "EFA 4x100G").fabric_name == "efa_4x100g"
    assert profile_for("B200-SXM", "NVSwitch+EFA 8x400G").fabric_name == "efa_32x100g"
    assert profile_for("H100-SXM-80GB", "IB 8x200G").fabric.nic_bytes_per_s == 25e9
    assert profile_for("H100-SXM-80GB", "RoCE 8x400G BF3").fabric_name == "roce_8x400g"
    assert profile_for("H100-SXM-80GB", "GPUDirect-TCPXO 8x200G").fabric_name == "tcpxo_8x200g"


def ranked(group: str, times: list[tuple[float, float]]) -> list[Scored]:
    return [
        Scored(category="plans", source="s", label="p", measured=measured, predicted=predicted, group=group)
        for measured, predicted in times
    ]


def test_ranking_by_hand() -> None:
    """Two of six pairs are in the wrong order; the plan ranked first takes 12 where 10 was possible. Three plans are too few."""
    rows = ranked("a", [(10, 2.0), (12, 1.0), (14, 4.0), (16, 3.0)]) + ranked("b", [(1, 3.0), (2, 2.0), (3, 1.0)])
    (found,) = rankings(rows)
    assert (found.groups, found.plans) == (1, 4)
    assert (found.tau, found.regret_pct) == (pytest.approx(1 / 3, abs=1e-3), pytest.approx(20.0))
    assert rankings(rows[4:]) == ()
