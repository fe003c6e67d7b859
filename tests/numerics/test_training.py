"""Training with exported files: data, schedule, checkpoints, interruption, on real gloo processes and on one."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pydoc_data.topics
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from planner.tracing.sources import find_factory
from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, optimum, run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")
TEXT = Path(pydoc_data.topics.__file__)


def losses(output: str) -> list[str]:
    return re.findall(r"^step (\d+ loss \S+)", output, flags=re.M)


@pytest.fixture(scope="module")
def script(llama: Model, bench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "train.py"
    path.write_text(llama.script(any_plan(bench, 4)))
    return path


def common(script: Path, *more: str) -> list[str]:
    return [str(script), "--device", "cpu", "--tiny", "--lr", "0.01", *more]


EXACT = ("--fp32", "--accumulate", "2", "--clip", "0.5")
"""Two batches a step, gradients cut to a norm that they exceed; in fp32, so that other meshes differ by rounding alone."""


def numbers(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in losses(output)]


def test_training_goes_on_from_a_checkpoint_on_another_mesh(script: Path, tmp_path: Path) -> None:
    """Four steps on (2, 2) = two, saved, and two more on (4, 1)."""
    saved, log = tmp_path / "saved", tmp_path / "steps.jsonl"
    flags = ["--steps", "4", "--save", str(saved), "--save-every", "2", "--log-json", str(log)]
    four = run([*TORCHRUN, *common(script, *EXACT, *flags)])
    assert four.returncode == 0, four.stderr[-3000:]
    rest = run([*TORCHRUN, *common(script, *EXACT, "--mesh", "4,1", "--steps", "4", "--resume", str(saved / "step-2"))])
    assert rest.returncode == 0, rest.stderr[-3000:]
    assert len(numbers(four.stdout)) == 4 and len(numbers(rest.stdout)) == 2
    assert numbers(rest.stdout) == pytest.approx(numbers(four.stdout)[2:], rel=1e-5)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and all(line["gnorm"] > 0.5 for line in lines), "clipping acts"
    assert [line["lr"] for line in lines] == pytest.approx([0.01, 0.00775, 0.00325, 0.001])  # cosine to a tenth
    again = run([sys.executable, *common(script, "--mesh", "1,1", "--steps", "4", "--resume", str(saved))])
    assert again.returncode == 2 and "the checkpoint is at step 4" in again.stderr


@pytest.mark.slow
def test_resuming_on_the_same_and_on_other_meshes(script: Path, tmp_path: Path) -> None:
    """The same mesh gives the same digits, in bf16 too; others differ by rounding."""
    for kind, more in (("bf16", ()), ("exact", EXACT)):
        saved = tmp_path / kind
        four = run([*TORCHRUN, *common(script, *more, "--steps", "4", "--save", str(saved), "--save-every", "2")])
        assert four.returncode == 0, four.stderr[-3000:]
        for mesh in ("2,2", "1,4", "1,1"):
            start = TORCHRUN if mesh != "1,1" else (sys.executable,)
            flags = ["--mesh", mesh, "--steps", "4", "--resume", str(saved / "step-2")]
            rest = run([*start, *common(script, *more, *flags)])
            assert rest.returncode == 0, rest.stderr[-3000:]
            if mesh == "2,2":
                assert losses(rest.stdout) == losses(four.stdout)[2:]
            near = {"abs": 2e-3} if kind == "bf16" else {"rel": 1e-5}
            assert numbers(rest.stdout) == pytest.approx(numbers(four.stdout)[2:], **near), (kind, mesh)


@pytest.mark.slow
def test_a_run_ended_by_sigterm_goes_on_on_another_mesh(script: Path, tmp_path: Path) -> None:
    """One rank is stopped at some step; two more steps on (4, 1) give what an uninterrupted run gives."""
    saved = tmp_path / "saved"
    flags = [*EXACT, "--min-lr", "0.01"]  # a constant rate: the cosine would depend on --steps
    command = [sys.executable, *common(script, *flags, "--mesh", "1,1", "--steps", "100000", "--save", str(saved))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 2 "):
            running.send_signal(signal.SIGTERM)
            break
    output, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors[-2000:]
    last = int(re.findall(r"stopped by SIGTERM after step (\d+)", output)[0])
    steps = str(last + 3)
    rest = run([*TORCHRUN, *common(script, *flags, "--mesh", "4,1", "--steps", steps, "--resume", str(saved))])
    whole = run([sys.executable, *common(script, *flags, "--mesh", "1,1", "--steps", steps)])
    assert rest.returncode == whole.returncode == 0, rest.stderr[-3000:] + whole.stderr[-3000:]
    assert len(numbers(rest.stdout)) == 2
    assert numbers(rest.stdout) == pytest.approx(numbers(whole.stdout)[-2:], rel=1e-5)


def test_sigterm_saves_and_a_later_run_goes_on(script: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    command = [sys.executable, *common(script, "--mesh", "1,1", "--steps", "100000", "--save", str(saved))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 3 "):
            running.send_signal(signal.SIGTERM)
            break
    output, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors[-2000:]
    last = int(re.findall(r"stopped by SIGTERM after step (\d+); resume with --resume", output)[0])
    assert [path.name for path in saved.iterdir()] == [f"step-{last + 1}"]
    more = run([sys.executable, *common(script, "--mesh", "1,1", "--steps", str(last + 2), "--resume", str(saved))])
    assert more.stdout.startswith(f"step {last + 1} "), more.stderr[-2000:]


def test_a_loss_that_is_no_number_ends_training(script: Path) -> None:
    done = run([sys.executable, *common(script, "--mesh", "1,1", "--steps", "9", "--lr", "1e30")])
    assert done.returncode == 1
    assert re.search(r"step [12]: loss \S+, gradient norm (nan|inf); .* there is no checkpoint", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_profile_names_the_redistributions(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, *common(script, "--mesh", "1,1", "--steps", "3", "--profile", "1:2")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    events = json.loads((tmp_path / "profile-rank0.json").read_text())["traceEvents"]
    assert any(" -> " in event.get("name", "") for event in events)


# ---- tokens -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def exported(script: Path) -> ModuleType:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("exported_train", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand(module: ModuleType, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
    module.local.place = SimpleNamespace(sizes=sizes, coordinate=coordinate)


def open_bytes(module: ModuleType, pattern: str, mesh: str, *more: str) -> object:
    module.configure(["--device", "cpu", "--mesh", mesh, "--data", pattern, "--token-dtype", "uint8", *more])
    stand(module, (1, 1), (0, 0))
    return module.open_tokens()


def test_ranks_together_read_the_batch_of_one_rank(exported: ModuleType) -> None:
    whole = open_bytes(exported, str(TEXT), "2,2")
    for name, split in (("tokens", ("S0", "S1")), ("labels", ("S1", "S1")), ("tokens", ("R", "S0"))):
        shape, _, dtype, high = exported.INPUTS[name]
        exported.INPUTS[name] = shape, ("R", "R"), dtype, high
        stand(exported, (1, 1), (0, 0))
        full = whole.read(name, 7)
        assert list(full.shape) == list(shape)
        exported.INPUTS[name] = shape, split, dtype, high
        for coordinate in ((0, 0), (0, 1), (1, 0), (1, 1)):
            stand(exported, (2, 2), coordinate)
            assert torch.equal(whole.read(name, 7), exported.piece(full, split)), (name, coordinate)


def test_labels_are_the_tokens_one_further(exported: ModuleType) -> None:
    data = open_bytes(exported, str(TEXT), "1,1")
    tokens, labels = data.read("tokens", 3), data.read("labels", 3)
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) and not torch.equal(tokens, labels)
    same = open_bytes(exported, str(TEXT), "1,1", "--shift", "labels=0")
    assert torch.equal(same.read("tokens", 3), same.read("labels", 3))


def test_an_epoch_holds_every_window_once_and_the_next_is_in_another_order(exported: ModuleType, tmp_path: Path) -> None:
    for number, count in enumerate((1000, 40, 5000)):
        (tmp_path / f"{number}.bin").write_bytes(bytes((7 * i + number) % 251 for i in range(count)))
    data = open_bytes(exported, str(tmp_path / "*.bin"), "1,1")
    total = sum((count - 1) // data.length for count in (1000, 40, 5000) if count > data.length)
    epochs = [[data.window(e * total + i)[0::2] for i in range(total)] for e in (0, 1)]
    assert len(set(epochs[0])) == len(set(epochs[1])) == total > 40
    assert set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1]


@pytest.mark.parametrize("total", [1, 2, 3, 17, 64, 1000])
def test_shuffled_is_a_permutation(exported: ModuleType, total: int) -> None:
    assert sorted(exported.shuffled(i, total, "0:0") for i in range(total)) == list(range(total))


def test_bad_data_is_refused_in_words(exported: ModuleType, tmp_path: Path) -> None:
    short, odd, high = tmp_path / "short.bin", tmp_path / "odd.bin", tmp_path / "high.bin"
    short.write_bytes(b"abc")
    with pytest.raises(exported.Wrong, match=r"no file of at least \d+ tokens"):
        open_bytes(exported, str(short), "1,1")
    odd.write_bytes(b"a" * 9999)
    with pytest.raises(exported.Wrong, match="no whole number of uint16 tokens"):
        open_bytes(exported, str(odd), "1,1", "--token-dtype", "uint16")
    high.write_bytes(b"\xff\xff" * 5000)
    data = open_bytes(exported, str(high), "1,1", "--token-dtype", "uint16")
    with pytest.raises(exported.Wrong, match=r"high\.bin holds the token id 65535; input tokens takes ids below"):
        data.read("tokens", 0)
    with pytest.raises(exported.Wrong, match="--shift nothing=1"):
        open_bytes(exported, str(high), "1,1", "--shift", "nothing=1")


@pytest.mark.slow
def test_fifty_steps_on_text_give_the_curve_of_the_plain_module(tmp_path: Path) -> None:
    """Byte tokens of a file of Python's library; the plain module is trained here by torch's own AdamW and clipping."""
    path = tmp_path / "train.py"
    model = Model.sample("llama3-tiny", batch=8, seq=64)
    path.write_text(model.script(optimum(model.bench("dp=2,tp=2"))))
    flags = [str(path), "--device", "cpu", "--lr", "0.001", "--steps", "50", "--warmup", "5", "--fp32"]
    flags += ["--data", str(TEXT), "--token-dtype", "uint8"]
    done = run([*TORCHRUN, *flags], timeout_s=900)
    assert done.returncode == 0, done.stderr[-3000:]
    sharded = [float(line.split()[-1]) for line in losses(done.stdout)]
    plain = plain_curve(path)
    assert len(sharded) == len(plain) == 50 and sharded[-1] < 0.8 * sharded[0]
    assert sharded == pytest.approx(plain, rel=1e-3)
    assert sharded[:10] == pytest.approx(plain[:10], rel=2e-5)


def plain_curve(path: Path) -> list[float]:
    """The loss of 50 steps of the user's module on the windows that the file reads, with initial values from the file."""
    spec = importlib.util.spec_from_file_location("plain_train", path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    data = open_bytes(file, str(TEXT), "1,1")
    module = find_factory("llama3-tiny")(layers=2, batch=8, seq=64)[0].to_empty(device="cpu")
    state = {name: file.initial(name, shape, rule) for name, (shape, _, _, rule) in file.PARAMS.items()}
    module.load_state_dict(state)
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.001, betas=(0.9, 0.95))
    found = []
    for step in range(50):
        rate = 0.001 * (step + 1) / 5 if step < 5 else 0.0001 + 0.0009 * (1 + math.cos(math.pi * (step - 5) / 44)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = module(data.read("tokens", step), data.read("labels", step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found
