"""`explain`: why a plan places a tensor as it does, what every other placement would cost, and why some cannot be had."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from planner import pipeline
from planner.commands.common import add_load_limit, only_answers_on_stdout, say, tracer
from planner.graph import JointGraph
from planner.placement import parse, text
from planner.plan import Plan
from planner.reasons import Explanation, LocalPrice, Override, Relaxation, Term
from planner.strategy import BannedRow
from planner.units import format_gib, format_ms

_SHOWN_TERMS = 12


def add(commands: Any) -> None:
    command = commands.add_parser("explain", help="why a placement, why not another, and what it would cost")
    command.add_argument("plan", type=Path)
    command.add_argument("--at", required=True, metavar="KEY", help="an op key or parameter name; with * for all layers")
    command.add_argument("--placement", metavar="S(0)R", help="the placement in question (default: a table of all)")
    command.add_argument("--graph", type=Path, help="a saved graph (plan --save-graph) instead of tracing again")
    command.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    add_load_limit(command)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan = Plan.load(args.plan)
    asked = parse(args.placement, plan.mesh) if args.placement else None
    bench = pipeline.workbench_of(plan, JointGraph.load(args.graph) if args.graph else None, progress=say, tracer=tracer(args))
    bench.warm_up()
    if asked is not None:
        with only_answers_on_stdout():
            found = bench.explain(plan, args.at, asked, time_limit_s=args.time_limit)
        print(json.dumps(found.to_json(), indent=1) if args.json else "\n".join(_explanation(found, plan)))
        return 0
    with only_answers_on_stdout():
        rows = bench.overrides(
            args.at, constraints=plan.constraints, checkpointed=plan.checkpointed, exact=None, time_limit_s=args.time_limit
        )
    single = args.at in plan.choices
    local = bench.local_prices(plan, args.at) if single else ()
    banned = bench.banned(args.at) if single else ()
    if args.json:
        data = {
            "at": args.at, "objective_us": plan.objective_us, "overrides": [row.to_json() for row in rows],
            "local": [price.to_json() for price in local],
            "banned": [{"axis": plan.mesh.axis_names[b.axis], "row": b.row, "reason": b.reason} for b in banned],
        }  # fmt: skip
        print(json.dumps(data, indent=1))
    else:
        print("\n".join(_table(args.at, plan, rows, {price.placements: price for price in local}, banned)))
    return 0


# ---- one placement ----------------------------------------------------------------------------------------------------
def _explanation(found: Explanation, plan: Plan) -> list[str]:
    many = f" ({found.count} tensors)" if found.count > 1 else ""
    now = ", ".join(text(p) for p in found.chosen)
    lines = [f"{found.where}{many} is {now} in plan {plan.plan_id}. Why not {text(found.asked)}?"]
    row = found.override
    if found.verdict == "chosen":
        return [lines[0], "  It is what the plan has."]
    if found.verdict == "unavailable":
        lines += [f"  unavailable ({reason.kind}): {reason.text}" for reason in found.reasons]
        return lines + _relaxations(found.relaxations)
    assert row.delta_us is not None and row.delta_bytes is not None
    proof = "proved" if row.certified else f"within {100 * row.gap:.2g} % of its bound"
    lines.append(
        f"  {_verdict_text(found)}: step time {_signed_us(row.delta_us)} ({proof}), memory {_signed_gib(row.delta_bytes)};"
        f" here {_signed_us(found.here_us)}, elsewhere {_signed_us(found.elsewhere_us)}"
    )
    lines += [f"  instead of: {constraint}" for constraint in found.replaces]
    if found.us_per_byte > 0:
        lines.append(f"  the memory budget binds: one GiB more would save about {format_ms(found.us_per_byte * 2**30)}")
    for title, here in (("here", True), ("elsewhere", False)):
        lines += _terms(title, [term for term in found.terms if term.here is here])
    return lines


def _verdict_text(found: Explanation) -> str:
    return {
        "dearer here": "dearer, mostly at the op itself",
        "dearer elsewhere": "cheaper at the op itself, but dearer elsewhere" if found.here_us < 0 else "dearer, mostly elsewhere",
        "tie": "a tie",
        "cheaper": "cheaper" if found.replaces else "cheaper: the plan at hand is not the best one",
    }[found.verdict]


def _terms(title: str, terms: list[Term]) -> list[str]:
    lines = [f"  {title}:"] if terms else []
    for term in terms[:_SHOWN_TERMS]:
        lines.append(f"    {_signed_us(term.us):>12s}  x{term.count:<3d} {term.what} {term.key} ({term.phase})")
        lines.append(f"                  {term.before}  ->  {term.after}")
    rest = terms[_SHOWN_TERMS:]
    if rest:
        lines.append(f"    {_signed_us(sum(term.us for term in rest)):>12s}  in {len(rest)} smaller terms (all with --json)")
    return lines


def _relaxations(found: tuple[Relaxation, ...]) -> list[str]:
    lines = ["  it becomes possible if one of these is given up:"] if found else []
    for relaxation in found:
        if relaxation.objective_us is None:
            why = f"still impossible: {'; '.join(relaxation.conflicts)}" if relaxation.conflicts else "not known in time"
            lines.append(f"    {relaxation.constraint}: {why}")
        else:
            memory = format_gib(relaxation.peak_bytes or 0)
            lines.append(f"    {relaxation.constraint}: step time {format_ms(relaxation.objective_us)}, memory {memory}")
    return lines


# ---- all placements ---------------------------------------------------------------------------------------------------
def _table(
    at: str, plan: Plan, rows: tuple[Override, ...], local: dict[Any, LocalPrice], banned: tuple[BannedRow, ...]
) -> list[str]:
    lines = [
        f"{at} in plan {plan.plan_id}: step time {format_ms(plan.objective_us)}, memory {format_gib(plan.memory.peak_bytes)}",
        f"  {'if pinned to':16s} {'step time':>12s} {'memory':>12s}  {'proof':14s} "
        f"{'at the op alone: compute + inputs + outputs (all else fixed)' if local else ''}",
    ]
    for row in rows:
        name = text(row.placements)
        if row.delta_us is None or row.delta_bytes is None:
            why = "; ".join(row.conflicts) or ("no plan has it" if row.status == "infeasible" else "no answer in time")
            lines.append(f"  {name:16s} impossible: {why}" if row.status == "infeasible" else f"  {name:16s} {why}")
            continue
        time_text = "now" if row.chosen else _signed_us(row.delta_us)
        proof = "proved" if row.certified else f"within {100 * row.gap:.2g} %"
        lines.append(
            f"  {name:16s} {time_text:>12s} {_signed_gib(row.delta_bytes):>12s}  {proof:14s} {_local(local.get(row.placements))}"
        )
    names = plan.mesh.axis_names
    lines += [f"  banned on {names[row.axis]}: {row.row}: {row.reason}" for row in banned]
    return lines


def _local(price: LocalPrice | None) -> str:
    if price is None:
        return ""
    if price.total_us is None:
        return "impossible"
    return f"{price.total_us:,.1f} = {price.compute_us:,.1f} + {price.inputs_us:,.1f} + {price.outputs_us:,.1f} us"


def _signed_us(us: float) -> str:
    return f"{us / 1e3:+,.3f} ms" if abs(us) >= 1000 else f"{us:+,.1f} us"


def _signed_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:+,.2f} GiB"
