"""Training with exported files: data, schedule, checkpoints, interruption, on real gloo processes and on one."""

from __future__ import annotations

import errno
import json
import math
import os
import pydoc_data.topics
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from planner.tracing.sources import find_factory
from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, imported, optimum, run, run_ranks

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")
TEXT = Path(pydoc_data.topics.__file__)


def losses(output: str) -> list[str]:
    return re.findall(r"^step (\d+ loss \S+)", output, flags=re.M)


@pytest.fixture(scope="module")
def script(llama: Model, bench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "train.py"
    path.write_text(llama.script(any_plan(bench, 4)))
    return path


@pytest.fixture
def exported(script: Path) -> ModuleType:
    return imported(script)


def common(script: Path, *more: str) -> list[str]:
    return [str(script), "--device", "cpu", "--tiny", "--lr", "0.01", *more]


EXACT = ("--fp32", "--accumulate", "2", "--clip", "0.5")
"""Two batches a step, gradients cut to a norm that they exceed; in fp32, so that other meshes differ by rounding alone."""


def numbers(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in losses(output)]


def test_training_goes_on_from_a_checkpoint_on_another_mesh(
    script: Path, exported: ModuleType, start: Start, tmp_path: Path
) -> None:
    """Four steps on (2, 2) = two, saved, and two more on (4, 1)."""
    saved, log = tmp_path / "saved", tmp_path / "steps.jsonl"
    flags = ["--steps", "4", "--save", str(saved), "--save-every", "2", "--log-json", str(log)]
    four = run([*TORCHRUN, *common(script, *EXACT, *flags)])
    assert four.returncode == 0, four.stderr[-3000:]
    resume = ["--mesh", "4,1", "--steps", "4", "--resume", str(saved / "step-2")]
    rest, *others = run_ranks(4, [sys.executable, *common(script, *EXACT, *resume)])
    assert not any(done.returncode for done in (rest, *others)), rest.stderr[-3000:]
    assert len(numbers(four.stdout)) == 4 and len(numbers(rest.stdout)) == 2
    assert numbers(rest.stdout) == pytest.approx(numbers(four.stdout)[2:], rel=1e-5)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and all(line["gnorm"] > 0.5 for line in lines), "clipping acts"
    assert [line["lr"] for line in lines] == pytest.approx([0.01, 0.00775, 0.00325, 0.001])  # cosine to a tenth
    code, _, errors = start(exported, "--steps", "4", "--resume", str(saved))
    assert code == 2 and "the checkpoint is at step 4" in errors
    one = tmp_path / "one.jsonl"
    assert start(exported, *EXACT, "--steps", "1", "--log-json", str(one))[0] == 0
    assert json.loads(one.read_text())["gnorm"] == pytest.approx(lines[0]["gnorm"], rel=1e-5), "copies count once"


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


def ended_by_sigterm(script: Path, saved: Path, *flags: str) -> int:
    """Train on one rank, stop it after some steps -> the last step done; its checkpoint lies in `saved`."""
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
    return int(re.findall(r"stopped by SIGTERM after step (\d+); resume with --resume", output)[0])


@pytest.mark.slow
def test_a_run_ended_by_sigterm_goes_on_on_another_mesh(script: Path, tmp_path: Path) -> None:
    """One rank is stopped at some step; two more steps on (4, 1) give what an uninterrupted run gives."""
    saved = tmp_path / "saved"
    flags = [*EXACT, "--min-lr", "0.01"]  # a constant rate: the cosine would depend on --steps
    last = ended_by_sigterm(script, saved, *flags)
    steps = str(last + 3)
    rest = run([*TORCHRUN, *common(script, *flags, "--mesh", "4,1", "--steps", steps, "--resume", str(saved))])
    whole = run([sys.executable, *common(script, *flags, "--mesh", "1,1", "--steps", steps)])
    assert rest.returncode == whole.returncode == 0, rest.stderr[-3000:] + whole.stderr[-3000:]
    assert len(numbers(rest.stdout)) == 2
    assert numbers(rest.stdout) == pytest.approx(numbers(whole.stdout)[-2:], rel=1e-5)


def test_sigterm_saves_and_a_later_run_goes_on(script: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    last = ended_by_sigterm(script, saved)
    assert [path.name for path in saved.iterdir()] == [f"step-{last + 1}"]
    more = run([sys.executable, *common(script, "--mesh", "1,1", "--steps", str(last + 2), "--resume", str(saved))])
    assert losses(more.stdout)[0].startswith(f"{last + 1} "), more.stderr[-2000:]


# ---- one rank, in this process ----------------------------------------------------------------------------------------
Start = Callable[..., tuple[int, str, str]]


@pytest.fixture
def start(capfd: pytest.CaptureFixture[str]) -> Iterator[Start]:
    """Run a file's main() on one rank -> exit code, what it printed, what it complained about."""
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()

    def started(module: ModuleType, *flags: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = module.main(["--device", "cpu", "--tiny", "--mesh", "1,1", "--lr", "0.01", *flags])
        except SystemExit as error:
            code = error.code
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return code, *capfd.readouterr()

    torch.set_num_threads(1)
    yield started
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


def test_a_loss_that_is_no_number_ends_training(exported: ModuleType, start: Start) -> None:
    code, _, errors = start(exported, "--steps", "9", "--lr", "1e30")
    assert code == 1
    assert re.search(r"step [12]: loss \S+, gradient norm (nan|inf); .* there is no checkpoint", errors), errors


def test_a_gradient_that_the_optimizer_would_misread_is_not_used(
    exported: ModuleType, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused AdamW takes elements in the order in which they lie; autograd hands on parameters' own order."""
    name = "layers.1.feed_forward.w1.weight"
    real = exported.Model.forward

    def transposed(model: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        def lie_otherwise(p: torch.Tensor) -> None:
            local = p.grad.to_local().t().contiguous().t()
            p.grad = exported.as_dtensor(local, *exported.PARAMS[name][:2])

        model.get_parameter(name).register_post_accumulate_grad_hook(lie_otherwise)
        return real(model, *inputs)

    assert start(exported, "--steps", "1")[0] == 0
    monkeypatch.setattr(exported.Model, "forward", transposed)
    with pytest.raises(AssertionError, match=re.escape(name)):
        start(exported, "--steps", "1")


def test_what_cannot_work_is_said_before_the_first_step(exported: ModuleType, start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flags, telling in (
        ("--lr nan", "--lr: nan is not a number of 0 or more"),
        ("--lr x", "--lr: invalid number value: 'x'"),
        ("--warmup -3", "--warmup: -3 is not"),
        ("--peak-tflops 0", "--peak-tflops: 0 is not"),
        ("--min-lr 9", "--min-lr 9.0 is above --lr 0.01"),
        ("--compile nothing", "the backends here are"),
        ("--check --dry-run", "not allowed with"),
        ("--shift labels=1", "give --data too"),
        (f"--data {tmp_path}", "it is a folder"),
        (f"--save {tmp_path}/file/x", "--save"),
        (f"--log-json {tmp_path}/none/x", "No such file or directory"),
        (f"--resume {tmp_path}", "there is no checkpoint"),
        ("--device cuda", "PyTorch sees 0 here"),
    ):
        code, printed, errors = start(exported, *flags.split())
        assert code == 2 and telling in errors and "step 0" not in printed, (flags, errors)


def test_a_checkpoint_of_another_model_is_refused_by_name(
    exported: ModuleType, script: Path, start: Start, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    assert start(exported, "--steps", "1", "--save", saved)[0] == 0
    code, _, errors = start(exported, "--steps", "2", "--resume", saved, "--seed", "1")
    assert code == 2 and "--seed 0" in errors
    other = tmp_path / "other.py"
    other.write_text(script.read_text().replace('"output.weight"', '"head.weight"'))
    code, _, errors = start(imported(other), "--steps", "2", "--resume", saved)
    assert code == 2 and "has no parameter head.weight" in errors
    other.write_text(re.sub(r"^TINY = .*", lambda line: line[0].replace('"V": 72', '"V": 144'), script.read_text(), flags=re.M))
    code, _, errors = start(imported(other), "--steps", "2", "--resume", saved)
    assert code == 2 and re.search(r"tok_embeddings.weight is \[72, \d+\] there, \[144, \d+\] here", errors)
    other.write_text(re.sub(r"^PLAN_ID = .*", 'PLAN_ID = "another"', script.read_text(), flags=re.M))
    code, printed, _ = start(imported(other), "--steps", "2", "--resume", saved)
    assert code == 0 and "this is another" in printed and losses(printed)[0].startswith("1 ")


def test_a_full_disk_ends_training_and_names_the_last_checkpoint(
    exported: ModuleType, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    (saved / "step-7.part").mkdir(parents=True)
    real, written = FileSystemWriter.write_data, []

    def write(self: FileSystemWriter, *arguments: Any) -> Any:
        written.append(self)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    code, printed, errors = start(exported, "--steps", "3", "--save", str(saved), "--save-every", "1", "--log-json", "/dev/full")
    assert code == 1 and len(losses(printed)) == 2, "an ended log is no reason to stop"
    assert printed.count("note: --log-json /dev/full: No space left on device") == 1
    assert "No space left on device" in errors and f"the last checkpoint is {saved}/step-1" in errors
    assert [path.name for path in saved.iterdir()] == ["step-1"], "nothing half-written stays"


def test_data_go_on_where_they_ended_with_another_number_of_batches_a_step(
    exported: ModuleType, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = exported.batch, []
    monkeypatch.setattr(exported, "batch", lambda sample: (read.append(sample), real(sample))[1])
    saved = str(tmp_path / "saved")
    assert start(exported, "--steps", "2", "--accumulate", "2", "--save", saved)[0] == 0
    assert start(exported, "--steps", "4", "--resume", saved)[0] == 0
    assert read == [exported.batch_size() * number for number in range(6)]


def test_a_profile_names_the_redistributions(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, *common(script, "--mesh", "1,1", "--steps", "3", "--profile", "1:2")]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    events = json.loads((tmp_path / "profile-rank0.json").read_text())["traceEvents"]
    assert any(" -> " in event.get("name", "") for event in events)


# ---- tokens -----------------------------------------------------------------------------------------------------------
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
    file = imported(path)
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
        loss = module(data.read("tokens", 8 * step), data.read("labels", 8 * step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found
