"""Step time of exported scripts against the plain module under DDP and FSDP2, as ratios, on CPU ranks.

Both take a full step (forward, backward, AdamW) on the same batches in the same precision, one after the other in one process per
rank; the ratio is that of the medians. A CPU is no GPU and gloo no NCCL: what a ratio over 1 tells is what the file's own Python
and copies cost beside the same arithmetic.

python -m tests.benchmarks.bench_step                          # ddp and fsdp plans of llama3-tiny, two ranks, eager
python -m tests.benchmarks.bench_step --compile --ranks 4      # block functions and blocks compiled with inductor
python -m tests.benchmarks.bench_step --only fsdp --profile    # where the script's step spends its time
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BASELINES = {"ddp": "DDP", "fsdp": "FSDP2"}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", choices=sorted(BASELINES))
    ap.add_argument("--ranks", type=int, default=2)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--seq", type=int, default=128)
    ap.add_argument("--rounds", type=int, default=9)
    ap.add_argument("--compile", action="store_true")
    ap.add_argument("--profile", action="store_true")
    ap.add_argument("--worker", nargs=2, metavar=("KIND", "SCRIPT"), help=argparse.SUPPRESS)
    options = ap.parse_args()
    if options.worker:
        Worker(options).run()
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {options.ranks} gloo ranks, one thread each, fp32")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for kind in [options.only] if options.only else BASELINES:
            script = Path(folder) / f"{kind}.py"
            script.write_text(written(kind, options))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
            asked = [__file__, *sys.argv[1:], "--worker", kind, str(script)]
            subprocess.run([*launch, *asked], check=True, env=environment, cwd=ROOT)


def written(kind: str, options: argparse.Namespace) -> str:
    """The training file of the recipe's plan over one data axis."""
    from planner.exporting.script import write_script
    from planner.graph import ModelRequest
    from planner.mesh import Mesh
    from planner.pipeline import tiny_graph, trace
    from planner.recipes import Recipe
    from planner.workbench import Workbench

    request = ModelRequest(
        model="llama3-tiny", batch=options.batch, seq=options.seq, layers=options.layers, precision="as-traced"
    )
    graph = trace(request)
    bench = Workbench.build(graph, Mesh.parse(f"dp={options.ranks}"))
    plan = bench.solve([*bench.default_constraints(2**60), Recipe.parse(kind, bench.mesh)], exact=False)
    return write_script(plan, graph, tiny_graph(graph))


class Worker:
    """One rank: the file's step and the baseline's, in turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.options, self.torch = options, torch
        self.kind, script = options.worker
        spec = importlib.util.spec_from_file_location("exported", script)
        assert spec is not None and spec.loader is not None
        self.train: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.train)
        self.train.configure(["--device", "cpu", "--fp32"])
        torch.set_num_threads(1)
        self.train.start()

    def run(self) -> None:
        import torch.distributed as dist

        ours, theirs = self.scripts_step(), self.baseline_step()
        times: dict[str, list[tuple[float, float]]] = {"script": [], BASELINES[self.kind]: []}
        for number in range(self.options.rounds + 2):
            for measured, step in zip(times.values(), (ours, theirs), strict=True):
                dist.barrier()
                begin, used = time.perf_counter(), time.process_time()
                step(number)
                dist.barrier()
                if number >= 2:
                    measured.append((time.perf_counter() - begin, time.process_time() - used))
        if dist.get_rank() == 0:
            self.report(times)
            if self.options.profile:
                print("rank 0 of the script, by time of its own:")
        if self.options.profile:
            self.profile(ours, show=dist.get_rank() == 0)
        dist.destroy_process_group()

    def report(self, times: dict[str, list[tuple[float, float]]]) -> None:
        (ours, ours_cpu), (theirs, theirs_cpu) = (
            [1e3 * statistics.median(column) for column in zip(*measured, strict=True)] for measured in times.values()
        )
        how = "compiled" if self.options.compile else "eager"
        print(
            f"{self.kind} plan, {how}: script {ours:.1f} ms ({ours_cpu:.1f} ms CPU), {BASELINES[self.kind]} {theirs:.1f} ms "
            f"({theirs_cpu:.1f} ms CPU); ratio {ours / theirs:.2f}, of CPU time {ours_cpu / theirs_cpu:.2f}",
            flush=True,
        )

    def scripts_step(self) -> Callable[[int], None]:
        train = self.train
        if self.options.compile:
            for name in train.BLOCKS:
                setattr(train, name, self.torch.compile(getattr(train, name), fullgraph=True))
        return self.step_of(train.Model())

    def baseline_step(self) -> Callable[[int], None]:
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        from sample_models.llama3 import llama3_tiny

        options = self.options
        module, _ = llama3_tiny(batch=options.batch, seq=options.seq, layers=options.layers)
        if options.compile:
            for block in module.layers:
                block.compile()
        if self.kind == "ddp":
            return self.step_of(DistributedDataParallel(module))
        for block in module.layers:
            fully_shard(block)
        return self.step_of(fully_shard(module))

    def step_of(self, model: Any) -> Callable[[int], None]:
        """The same data, and the file's optimizer: the same groups and kernels."""
        train, optimizer = self.train, self.train.make_optimizer(model)

        def step(number: int) -> None:
            model.zero_grad()
            model(*train.batch(number * train.batch_size())).backward()
            optimizer.step()

        return step

    def profile(self, step: Callable[[int], None], *, show: bool) -> None:
        import cProfile
        import pstats

        watching = cProfile.Profile()
        watching.enable()
        for number in range(3):
            step(number)
        watching.disable()
        if show:
            pstats.Stats(watching).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
