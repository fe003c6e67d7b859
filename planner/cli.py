"""The command line: one command is one API call. Bad input: one message with a hint on stderr, exit code 2, no file written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner import pipeline
from planner.constraint import Pin
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.exporting.report import report_lines
from planner.graph import JointGraph, ModelRequest, without_layer
from planner.mesh import Mesh
from planner.plan import Plan
from planner.units import format_gb, format_gib, format_ms, parse_bytes

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except InfeasibleError as error:
        lines = [error.explain(), *(f"  conflict: {c}" for c in error.conflicts)]
        print("error: " + "\n".join(lines), file=sys.stderr)
        return BAD_INPUT
    except PlannerError as error:
        print(f"error: {error.explain()}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m planner", description="Plan how a training model is sharded over a mesh.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("models", help="list the sample models")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_models)
    _add_plan(commands)
    command = commands.add_parser("show", help="what a plan decides and costs")
    command.add_argument("plan", type=Path)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_show)
    command = commands.add_parser("diff", help="what differs between two plans")
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_diff)
    command = commands.add_parser("export", help="write the training script that runs a plan")
    command.add_argument("plan", type=Path)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="train.py")
    command.add_argument("--graph", type=Path, help="a saved graph (plan --save-graph) instead of tracing again")
    command.add_argument(
        "--no-verify", action="store_true", help="skip the comparison with the model (it is then said so in the report)"
    )
    command.set_defaults(run=_export)
    return parser


def _add_plan(commands: Any) -> None:
    command = commands.add_parser("plan", help="choose a placement for every tensor")
    command.add_argument("model", help="a sample name (see `models`) or path/to/file.py:factory")
    command.add_argument("--mesh", required=True, metavar="dp=8,tp=8", help="axis=size, outermost first")
    command.add_argument("--hardware", default="h100_sxm")
    command.add_argument("--batch", type=int, help="global sequences per micro-step (default: one per device)")
    command.add_argument("--seq", type=int)
    command.add_argument("--layers", type=int)
    command.add_argument(
        "--precision", choices=("bf16-mixed", "as-traced"), help="default: bf16-mixed for samples, as-traced otherwise"
    )
    command.add_argument("--optimizer", default="adamw")
    command.add_argument("--gpus-per-node", type=int, default=8)
    command.add_argument("--memory", metavar="80GiB", help="budget per device (default: what the hardware leaves)")
    command.add_argument("--pin", action="append", default=[], metavar="WHERE=PLACEMENTS")
    command.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    command.add_argument(
        "--from", dest="replay", type=Path, metavar="plan.json", help="take all decisions from a plan: no solver"
    )
    command.add_argument("--graph", type=Path, help="a saved graph instead of tracing")
    command.add_argument("--save-graph", type=Path, metavar="graph.json.gz")
    command.add_argument("-o", "--output", type=Path, metavar="plan.json")
    command.add_argument("--stats", type=Path, metavar="stats.json")
    command.set_defaults(run=_plan)


# ---- commands ---------------------------------------------------------------------------------------------------------
def _models(args: argparse.Namespace) -> int:
    found = pipeline.models()
    if args.json:
        print(json.dumps([{"name": m.name, "description": m.description} for m in found], indent=1))
    else:
        for model in found:
            print(f"{model.name:14s} {model.description}")
        print("Any other model: path/to/file.py:factory")
    return 0


def _request(args: argparse.Namespace) -> pipeline.PlanRequest:
    mesh = Mesh.parse(args.mesh)
    precision = args.precision or ("as-traced" if ".py" in args.model else "bf16-mixed")
    return pipeline.PlanRequest(
        model=ModelRequest(model=args.model, batch=args.batch, seq=args.seq, layers=args.layers, precision=precision),
        mesh=mesh,
        hardware=args.hardware,
        memory_bytes=parse_bytes(args.memory) if args.memory else None,
        optimizer=args.optimizer,
        gpus_per_node=args.gpus_per_node,
        pins=tuple(Pin.parse(pin, mesh) for pin in args.pin),
        time_limit_s=args.time_limit,
    )


def _plan(args: argparse.Namespace) -> int:
    request = _request(args)
    for path in (args.output, args.stats, args.save_graph):
        _check_writable(path)
    graph = JointGraph.load(args.graph) if args.graph else None
    replay = Plan.load(args.replay) if args.replay else None
    found = pipeline.make_plan(request, graph=graph, replay=replay, progress=_say)
    if args.save_graph:
        found.graph.save(args.save_graph)
    if args.output:
        found.plan.save(args.output)
    if args.stats:
        args.stats.write_text(json.dumps(found.stats.to_json(), indent=1) + "\n")
    print(summary(found.plan))
    return 0


def _say(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr, flush=True)


def _check_writable(path: Path | None) -> None:
    if path is not None and not path.resolve().parent.is_dir():
        raise InputError(f"there is no folder {path.resolve().parent} to write {path.name} in", hint="Make the folder first.")


def _show(args: argparse.Namespace) -> int:
    plan = Plan.load(args.plan)
    print(json.dumps(as_dict(plan), indent=1) if args.json else details(plan))
    return 0


def _diff(args: argparse.Namespace) -> int:
    a, b = Plan.load(args.a), Plan.load(args.b)
    if a.mesh.num_axes != b.mesh.num_axes:
        raise InputError(f"the plans have different numbers of axes: {a.mesh} and {b.mesh}", hint="Compare plans on like meshes.")
    changes = pipeline.diff(a, b)
    if args.json:
        rows = [{"key": c.key, "before": c.before, "after": c.after} for c in changes]
        print(json.dumps({"objective_us": [a.objective_us, b.objective_us], "changes": rows}, indent=1))
        return 0
    for label, x, y, form in (
        ("step time", a.objective_us, b.objective_us, format_ms),
        ("compute", a.compute_us, b.compute_us, format_ms),
        ("communication", a.comm_us, b.comm_us, format_ms),
        ("memory", a.memory.peak_bytes, b.memory.peak_bytes, format_gib),
    ):
        print(f"{label:14s} {form(x):>14s} -> {form(y):>14s}  ({y - x:+,.0f} {'bytes' if label == 'memory' else 'us'})")
    groups: dict[tuple[str, str | None, str | None], int] = {}
    for change in changes:
        group = (without_layer(change.key), change.before, change.after)
        groups[group] = groups.get(group, 0) + 1
    print(f"{len(changes)} tensors change placement")
    for (key, before, after), count in groups.items():
        print(f"  x{count:<3d} {key}  {before or '(absent)'} -> {after or '(absent)'}")
    return 0


def _export(args: argparse.Namespace) -> int:
    _check_writable(args.output)
    plan = Plan.load(args.plan)
    graph = JointGraph.load(args.graph) if args.graph else None
    found = pipeline.export(plan, graph, verify=not args.no_verify, progress=_say)
    sidecar = args.output.with_name(args.output.stem + ".plan.json")
    args.output.write_text(found.script)
    plan.save(sidecar)
    print(f"wrote {args.output} ({len(found.script.splitlines())} lines) and {sidecar}")
    for line in report_lines(found.report):
        print(f"  {line}")
    return 0


# ---- text -------------------------------------------------------------------------------------------------------------
def as_dict(plan: Plan) -> dict[str, Any]:
    """The answer of `show --json`."""
    return {
        "plan_id": plan.plan_id,
        "model": plan.request.to_json(),
        "mesh": str(plan.mesh),
        "hardware": plan.hardware_name,
        "status": plan.report.status,
        "objective_us": plan.objective_us,
        "objective": "serial, no overlap",
        "bound_us": plan.report.bound_us,
        "gap": plan.report.gap,
        "method": plan.report.method,
        "compute_us": plan.compute_us,
        "comm_us": plan.comm_us,
        "peak_bytes": plan.memory.peak_bytes,
        "memory": plan.memory.to_json(),
        "comm_bytes": plan.comm_bytes,
        "collectives": plan.collective_counts,
        "num_ops": plan.num_ops,
        "constraints": [c.to_json() for c in plan.constraints],
        "pins": [pin.to_json() for pin in plan.pins],
        "replicated_for_lack_of_a_rule": list(plan.replicated_for_lack_of_a_rule),
        "placements": {
            key: [None if p is None else "".join(map(str, p)) for p in choice.outputs] for key, choice in plan.choices.items()
        },
    }


def summary(plan: Plan) -> str:
    report = plan.report
    proof = "proved optimal" if report.status == "optimal" else f"{report.status}, within {100 * report.gap:.2g} % of the bound"
    lines = [
        f"plan {plan.plan_id}: {plan.request.model} on {plan.mesh}, {plan.hardware_name}, {proof} ({report.method})",
        f"  step time {format_ms(plan.objective_us)} (serial, no overlap) = compute {format_ms(plan.compute_us)}"
        f" + communication {format_ms(plan.comm_us)}",
        f"  memory {format_gib(plan.memory.peak_bytes)} per device: "
        + ", ".join(f"{name.removesuffix('_bytes')} {format_gib(value)}" for name, value in plan.memory.to_json().items()),
    ]
    for axis, kinds in plan.comm_bytes.items():
        lines.append(f"  traffic on {axis}: " + ", ".join(f"{kind} {format_gb(size)}" for kind, size in kinds.items()))
    if plan.replicated_for_lack_of_a_rule:
        lines.append(f"  replicated for lack of a rule: {', '.join(plan.replicated_for_lack_of_a_rule)}")
    return "\n".join(lines)


def details(plan: Plan) -> str:
    """Summary, constraints, and the placements of parameters and module outputs, equal layers once."""
    lines = [summary(plan), "constraints:", *(f"  {c.describe()}" for c in plan.constraints), "placements (equal layers once):"]
    groups: dict[tuple[str, str], list[str]] = {}
    for key, choice in plan.choices.items():
        text = ", ".join("-" if p is None else "".join(map(str, p)) for p in choice.outputs)
        groups.setdefault((without_layer(key), text), []).append(key)
    lines += [f"  x{len(keys):<3d} {key:70s} {text}" for (key, text), keys in groups.items()]
    return "\n".join(lines)
