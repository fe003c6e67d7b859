"""`sweep`: one model on every mesh shape of a number of devices."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner import pipeline
from planner.commands.common import (
    Watching,
    add_load_limit,
    check_writable,
    only_answers_on_stdout,
    say,
    tracer,
)
from planner.errors import InputError
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.sweep import Entry, SweepFile, SweepProgress, SweepRequest, ordered, pareto, sweep
from planner.units import format_gib, format_ms, parse_bytes

_BAR = 24


def add(commands: Any) -> None:
    command = commands.add_parser("sweep", help="step time and memory on every mesh shape of a number of devices")
    command.add_argument("model", help="a sample name (see `models`) or path/to/file.py:factory")
    command.add_argument("--devices", type=int, required=True)
    command.add_argument("--axes", default="1..3", metavar="1..3", help="numbers of mesh axes to try")
    command.add_argument("--hardware", default="h100_sxm")
    command.add_argument("--batch", type=int, help="global sequences per micro-step (default: one per device)")
    command.add_argument("--seq", type=int)
    command.add_argument("--layers", type=int)
    command.add_argument("--precision", choices=("bf16-mixed", "as-traced"))
    command.add_argument("--optimizer", default="adamw")
    command.add_argument("--gpus-per-node", type=int, default=8)
    command.add_argument("--memory", metavar="80GiB", help="budget per device (default: what the hardware leaves)")
    command.add_argument("--checkpoint", default="auto", metavar="auto|none|full|full:16")
    command.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="for each mesh")
    command.add_argument("--graph", type=Path, help="a saved graph instead of tracing")
    command.add_argument("-o", "--output", type=Path, metavar="sweep.json", help="written after every mesh")
    command.add_argument("--plans", type=Path, metavar="FOLDER", help="keep the plan of every mesh here")
    command.add_argument("--resume", action="store_true", help="go on with the file of -o")
    command.add_argument("--json", action="store_true")
    add_load_limit(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    request = _request(args)
    check_writable(args.output)
    if args.plans is not None and not args.plans.is_dir():
        raise InputError(f"there is no folder {args.plans}", hint="Make the folder first.")
    if args.resume and args.output is None:
        raise InputError("--resume needs the file of a sweep", hint="Give it with -o sweep.json.")
    if args.output is not None and args.output.exists() and not args.resume:
        raise InputError(f"{args.output} is there already", hint="Give --resume to go on with it, or another name.")
    graph = _graph(args, request)
    found = SweepFile.begin(request, graph, pipeline.hardware_profile(request.hardware).content_hash)
    if args.resume and args.output.exists():
        found = SweepFile.load(args.output).resumed(found, args.output)
    watching = Watching()
    bar = _Bar()
    watching.begin()
    with watching.ctrl_c(), only_answers_on_stdout():
        for entry, plan in sweep(request, graph, done=found.meshes, progress=bar.show, cancelled=watching.cancelled):
            found = found.add(entry)
            if args.output is not None:
                found.save(args.output)
            if args.plans is not None and plan is not None:
                plan.save(args.plans / f"{entry.mesh.replace('=', '').replace(',', '_')}.plan.json")
    bar.end()
    if watching.stopped:
        print(f"stopped after {len(found.entries)} meshes" + ("; go on with --resume" if args.output else ""), file=sys.stderr)
    if args.json:
        data = {"pareto": pareto(found.entries), "entries": [entry.to_json() for entry in ordered(found.entries)]}
        print(json.dumps(data, indent=1))
    else:
        print("\n".join(_table(request, found.entries)))
    return 0


def _request(args: argparse.Namespace) -> SweepRequest:
    match = re.fullmatch(r"([1-9])(?:\.\.([1-9]))?", args.axes)
    if match is None:
        raise InputError(f"--axes {args.axes} is no range", hint="For example --axes 1..3 or --axes 2.")
    precision = args.precision or ("as-traced" if ".py" in args.model else "bf16-mixed")
    return SweepRequest(
        model=ModelRequest(model=args.model, batch=args.batch, seq=args.seq, layers=args.layers, precision=precision),
        devices=args.devices, axes=(int(match[1]), int(match[2] or match[1])), hardware=args.hardware,
        memory_bytes=parse_bytes(args.memory) if args.memory else None, optimizer=args.optimizer,
        gpus_per_node=args.gpus_per_node, checkpoint=args.checkpoint, time_limit_s=args.time_limit,
    )  # fmt: skip


def _graph(args: argparse.Namespace, request: SweepRequest) -> JointGraph:
    """Traced once; the batch does not depend on the shape of the mesh."""
    if args.graph:
        return JointGraph.load(args.graph)
    if request.devices < 1:
        raise InputError(f"{request.devices} devices are no mesh", hint="Give --devices 2 or more.")
    say("trace")
    one = Mesh(axis_names=("dp",), axis_sizes=(request.devices,))
    return tracer(args)(pipeline.PlanRequest(model=request.model, mesh=one).sized_model)


class _Bar:
    """A progress bar on stderr: one line that is written over on a terminal, one line per mesh elsewhere."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self._last = ""

    def show(self, now: SweepProgress) -> None:
        filled = round(_BAR * now.done / max(1, now.total))
        stage = now.stage
        if math.isfinite(now.value_us) and now.bound_us > 0:
            stage = f"{stage}, within {100 * max(0.0, 1 - now.bound_us / now.value_us):.2g} %"
        line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {now.done}/{now.total} {now.mesh}: {stage}"
        if self.is_terminal:
            print(f"\r{line:<100.100s}", end="", file=sys.stderr, flush=True)
        elif now.mesh != self._last:
            print(line.rpartition(":")[0], file=sys.stderr, flush=True)
        self._last = now.mesh

    def end(self) -> None:
        if self.is_terminal and self._last:
            print(file=sys.stderr)


def _table(request: SweepRequest, entries: Sequence[Entry]) -> list[str]:
    front, found = set(pareto(entries)), ordered(entries)
    best = next((e.objective_us for e in found if e.objective_us is not None), None)
    lines = [
        f"{request.model.model} on {request.devices} x {request.hardware}: {len(entries)} meshes; * = nothing is better in both "
        "step time and memory",
        f"  {'mesh':22s} {'step time':>11s} {'':>8s} {'memory':>10s}  {'proof':13s} {'repeated':>8s}  traffic (GB)",
    ]
    for entry in found:
        if entry.objective_us is None or best is None:
            lines.append(f"  {entry.mesh:22s} {entry.status}: {entry.reason}")
            continue
        proof = "proved" if entry.status == "optimal" else f"within {100 * (entry.gap or 0):.2g} %"
        traffic = ", ".join(f"{axes} {size / 1e9:.1f}" for axes, size in entry.comm_bytes.items())
        lines.append(
            f"{'*' if entry.mesh in front else ' '} {entry.mesh:22s} {format_ms(entry.objective_us):>11s} "
            f"{100 * (entry.objective_us / best - 1):>+7.1f}% {format_gib(entry.peak_bytes or 0):>10s}  {proof:13s} "
            f"{entry.checkpointed:>8d}  {traffic}"
        )
    return lines
