"""`export`: the training script that runs a plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planner import pipeline
from planner.commands.common import add_load_limit, check_writable, say, tracer, write_text
from planner.errors import InputError
from planner.exporting.report import report_lines
from planner.exporting.slurm import slurm_script
from planner.graph import JointGraph
from planner.plan import Plan


def add(commands: Any) -> None:
    command = commands.add_parser("export", help="write the training script that runs a plan")
    command.add_argument("plan", type=Path)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="train.py")
    command.add_argument("--graph", type=Path, help="a saved graph (plan --save-graph) instead of tracing again")
    command.add_argument(
        "--no-verify", action="store_true", help="skip the comparison with the model (it is then said so in the report)"
    )
    command.add_argument("--embed-plan", action="store_true", help="store the plan inside the file too (train.py --print-plan)")
    command.add_argument("--slurm", action="store_true", help="write train.sbatch for a Slurm cluster too")
    command.add_argument(
        "--format", choices=("script", "recipe"), default="script",
        help="script runs the plan exactly; recipe is a short file of parallelize_module and fully_shard, approximate, for plans "
        "that can be said that way",
    )  # fmt: skip
    add_load_limit(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_writable(args.output)
    plan = Plan.load(args.plan)
    graph = JointGraph.load(args.graph) if args.graph else None
    if args.format == "recipe":
        for flag, given in (("--embed-plan", args.embed_plan), ("--slurm", args.slurm)):
            if given:
                raise InputError(
                    f"{flag} belongs to --format script", hint=f"Leave {flag} out; the plan lies beside a recipe too."
                )
        found = pipeline.export_recipe(plan, graph, verify=not args.no_verify, progress=say, tracer=tracer(args))
    else:
        found = pipeline.export(
            plan, graph, verify=not args.no_verify, embed_plan=args.embed_plan, progress=say, tracer=tracer(args)
        )
    sidecar = args.output.with_name(args.output.stem + ".plan.json")
    write_text(args.output, found.script)
    plan.save(sidecar)
    if args.slurm:
        batch_file = args.output.with_suffix(".sbatch")
        write_text(batch_file, slurm_script(plan, args.output.name))
        print(f"wrote {batch_file}")
    print(f"wrote {args.output} ({len(found.script.splitlines())} lines) and {sidecar}")
    for line in report_lines(found.report):
        print(f"  {line}")
    return 0
