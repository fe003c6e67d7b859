"""`plan`: choose a placement for every tensor."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner import pipeline
from planner.commands.common import Watching, add_load_limit, check_writable, tracer, write_text
from planner.commands.describe import forecast_text, summary
from planner.constraint import RESHARD, Allow, Constraint, Pin, ReshardAfterForward, SamePlacement, parse_forbid, parse_recipe
from planner.errors import InputError, SolverError
from planner.graph import JointGraph, ModelRequest
from planner.hardware_changes import joined_name, split_name
from planner.mesh import Mesh
from planner.plan import Plan
from planner.recipes import RECIPES
from planner.units import parse_bytes


def add(commands: Any) -> None:
    command = commands.add_parser("plan", help="choose a placement for every tensor")
    command.add_argument(
        "model", nargs="?", help="a sample name (see `models`), path/to/file.py:factory, program.pt2, hf:path/to/config.json"
    )
    command.add_argument("--mesh", metavar="dp=8,tp=8", help="axis=size, outermost first")
    command.add_argument("--hardware", help="default: h100_sxm")
    command.add_argument("--fabric", help="network between nodes, if not the profile's own (roce_8x400g, efa_32x100g, ...)")
    command.add_argument("--batch", type=int, help="global sequences per micro-step (default: one per device)")
    command.add_argument("--seq", type=int)
    command.add_argument("--layers", type=int)
    command.add_argument(
        "--precision", choices=("bf16-mixed", "as-traced"), help="default: bf16-mixed for samples and hf:, as-traced otherwise"
    )
    command.add_argument("--optimizer", help="default: adamw")
    command.add_argument("--gpus-per-node", type=int, help="default: 8")
    command.add_argument("--memory", metavar="80GiB", help="budget per device (default: what the hardware leaves)")
    command.add_argument(
        "--checkpoint",
        metavar="auto|none|full|full:16",
        help="layers whose forward pass runs again in backward; default: auto, as few as the budget makes worthwhile",
    )
    add_constraints(command)
    command.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    command.add_argument(
        "--from",
        dest="replay",
        type=Path,
        metavar="plan.json",
        help="take all decisions, and what is not given here, from a plan: no solver",
    )
    add_load_limit(command)
    command.add_argument("--graph", type=Path, help="a saved graph instead of tracing")
    command.add_argument("--save-graph", type=Path, metavar="graph.json.gz")
    command.add_argument("-o", "--output", type=Path, metavar="plan.json")
    command.add_argument("--stats", type=Path, metavar="stats.json")
    command.set_defaults(run=run)


def add_constraints(command: argparse.ArgumentParser) -> None:
    """Flags of constraints. Each may be given several times and may end in ` # a note`."""
    command.add_argument(
        "--pin", action="append", default=[], metavar="WHERE=PLACEMENTS", help="for example 'layers.*.attention.wq=S(0)R # why'"
    )
    command.add_argument("--allow", action="append", default=[], metavar="WHERE=P1|P2", help="one of these placements")
    command.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="KIND@AXIS or WHERE=P1|P2",
        help="a collective on an axis ('all_to_all@dp', '*@dp'), or placements of a tensor",
    )
    command.add_argument("--tie", action="append", default=[], metavar="GLOB", help="the same placement for all that match")
    command.add_argument(
        "--recipe",
        action="append",
        default=[],
        metavar="NAME[:AXES]",
        help=f"what experts write by hand, on these mesh axes (default: all): {', '.join(RECIPES)}",
    )
    command.add_argument(
        "--reshard-after-forward",
        choices=("auto", *RESHARD),
        help="always: backward gathers parameters again (FSDP, ZeRO-3); never: what forward gathered is kept for it (ZeRO-2); "
        "auto: kept where that pays and fits. Default: auto, with a recipe always",
    )


def constraints_of(args: argparse.Namespace, mesh: Mesh) -> tuple[Constraint, ...]:
    """All constraints of the command line except pins and memory."""
    reshard = args.reshard_after_forward
    return (
        *(replace(parse_recipe(written, mesh), may_keep=reshard in ("auto", "never")) for written in args.recipe),
        *(() if reshard in (None, "auto") else (ReshardAfterForward(when=reshard),)),
        *(Allow.parse(written, mesh) for written in args.allow),
        *(parse_forbid(written, mesh) for written in args.forbid),
        *(SamePlacement.parse(written) for written in args.tie),
    )


def run(args: argparse.Namespace) -> int:
    replay = Plan.load(args.replay) if args.replay else None
    request = plan_request(args, replay)
    for path in (args.output, args.stats, args.save_graph):
        check_writable(path)
    graph = JointGraph.load(args.graph) if args.graph else None
    watching = Watching()
    try:
        with watching.ctrl_c():
            found = pipeline.make_plan(
                request, graph=graph, replay=replay, progress=watching.stage, tracer=tracer(args), told=watching.told,
                cancelled=watching.cancelled,
            )  # fmt: skip
    except SolverError as error:
        if not watching.stopped:
            raise
        raise KeyboardInterrupt from error
    if args.save_graph:
        found.graph.save(args.save_graph)
    if args.output:
        found.plan.save(args.output)
    if args.stats:
        write_text(args.stats, json.dumps(found.stats.to_json(), indent=1) + "\n")
    if watching.stopped:
        print("stopped: this is the best plan so far", file=sys.stderr)
    print(summary(found.plan))
    print(forecast_text(pipeline.forecasts(found.plan, found.graph)))
    return 0


def plan_request(args: argparse.Namespace, replay: Plan | None = None) -> pipeline.PlanRequest:
    """What the command line asks for; what it leaves open is as in the plan to replay, else the default."""
    if replay is None and (args.model is None or args.mesh is None):
        raise InputError("a plan needs a model and --mesh", hint="For example: plan llama3-tiny --mesh dp=2,tp=2 -o plan.json.")
    mesh = replay.mesh if args.mesh is None and replay is not None else Mesh.parse(args.mesh)
    return pipeline.PlanRequest(
        model=_model_request(args, replay),
        mesh=mesh,
        hardware=_hardware(args, replay),
        memory_bytes=parse_bytes(args.memory) if args.memory else None,
        optimizer=args.optimizer or (replay.memory_policy.optimizer if replay else "adamw"),
        gpus_per_node=args.gpus_per_node or (replay.gpus_per_node if replay else 8),
        pins=tuple(Pin.parse(pin, mesh) for pin in args.pin),
        constraints=constraints_of(args, mesh),
        time_limit_s=args.time_limit,
        checkpoint=args.checkpoint or "auto",
    )


def _hardware(args: argparse.Namespace, replay: Plan | None) -> str:
    """`h100_sxm`, or with another network than its own `h100_sxm+roce_8x400g`. An unknown one is refused before any work."""
    name: str = args.hardware or (replay.hardware_name if replay else "h100_sxm")
    if args.fabric:
        machine, _, factors = split_name(name)
        name = joined_name(machine, args.fabric, factors)
    pipeline.hardware_profile(name)
    return name


def _model_request(args: argparse.Namespace, replay: Plan | None) -> ModelRequest:
    asked = {"batch": args.batch, "seq": args.seq, "layers": args.layers, "precision": args.precision}
    if replay is not None and args.model in (None, replay.request.model):
        return replace(replay.request, **{name: value for name, value in asked.items() if value is not None})
    asked["precision"] = args.precision or ("as-traced" if ModelRequest(model=args.model).is_users_own else "bf16-mixed")
    return ModelRequest(model=args.model, **asked)
