"""A plan as one HTML file to attach to a ticket: read without network and without script; the plan itself is inside.

The same plan with the same base gives the same bytes. Every name passes through `escape`.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version

from app.view_models import compare, hotspots
from app.view_models.demands import headline, note_of, of_plan, options_of, where_of
from app.view_models.placements import placements_text
from app.view_models.status import GB, GIB, Quantity, strip, verdict
from planner import BoundaryPlacement, Plan
from planner.hardware import HardwareProfile
from planner.plan import PLAN_SCHEMA

MOST_GROUPS = 60
_MEMORY = (
    ("parameters", "parameter_bytes"), ("gradients", "gradient_bytes"), ("optimizer state", "optimizer_bytes"),
    ("saved activations", "activation_bytes"), ("kept parameters", "kept_parameter_bytes"),
)  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 24px auto; padding: 0 20px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 30px 0 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; font-weight: 600; } td, th { padding: 4px 12px 4px 0; vertical-align: top; overflow-wrap: anywhere; }
tr + tr td { border-top: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.strip { display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 12px 0; } .soft { opacity: .72; }
.bar { background: #6366f1; height: 9px; margin-top: 6px; border-radius: 2px; min-width: 1px; }
@media print { :root { color-scheme: light; } body { max-width: none; margin: 0; } tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .bar { print-color-adjust: exact; } }
.notice { border-left: 4px solid #d97706; padding: 4px 12px; } code { font-size: 12.5px; }
"""


def report(plan: Plan, base: Plan | None, profile: HardwareProfile) -> str:
    """The whole file. `profile` is that of the plan; one that has changed since is said."""
    title = f"{plan.request.model}, plan {plan.plan_id}"
    sections = (
        _head(plan, base), _inputs(plan), _demands(plan), _memory(plan), _volumes(plan), _hotspots(plan),
        *([_difference(base, plan)] if base is not None else []), _parameters(plan), _hardware(plan, profile), _origin(plan),
    )  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def _p(text: str, kind: str = "soft") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """All cells are text; `numbers` are the columns that stand at the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        scope = " scope=col" if tag == "th" else ""
        made = (f"<{tag}{scope}{' class=n' if at in numbers else ''}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    return f"<table>{line('th', head) if any(head) else ''}{''.join(line('td', row) for row in rows)}</table>"


# ---- sections -----------------------------------------------------------------------------------------------------------


def _head(plan: Plan, base: Plan | None) -> str:
    data = strip(plan, base, of_plan(plan))
    items = "".join(f"<span>{_number(q)}</span>" for q in data.quantities)
    against = f"; differences in brackets are against base plan {base.plan_id}" if base is not None else ""
    notice = ""
    if plan.report.status != "optimal":
        notice = _p(f"Not proven optimal: the plan is within {100 * plan.report.gap:.2g} % of the best possible.", "notice")
    return (
        f"<h1>{escape(plan.request.model)}</h1>"
        f"{_p(f'plan {plan.plan_id} on mesh {plan.mesh}, {plan.mesh.num_devices} devices of {plan.hardware_name}')}"
        f'<div class="strip"><b>{escape(data.verdict)}</b><b>{escape(data.state)}</b>{items}</div>{notice}'
        f"{_p(f'Predicted, not measured. Step time is serial, without overlap{against}. GiB = 2^30, GB = 10^9 bytes.')}"
    )


def _number(q: Quantity) -> str:
    delta = f" ({q.delta_text})" if q.delta_text else ""
    return f'<span class="soft">{escape(q.label)}</span> <b>{escape(q.text)}</b>{escape(delta)}'


def _inputs(plan: Plan) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    rows = [*compare.inputs(plan), ("mesh axes, outermost first", axes)]
    return _section("Inputs", _table(("", ""), rows))


def _demands(plan: Plan) -> str:
    demands = of_plan(plan)
    boundaries = [c for c in plan.constraints if isinstance(c, BoundaryPlacement)]
    rows = [(headline(d), where_of(d), " or ".join(options_of(d)), note_of(d)) for d in demands]
    rows += [("boundary of the model", b.where, placements_text(b.placements), "") for b in boundaries]
    said = _table(("constraint", "where", "placement", "reason"), rows) if rows else _p("None but the memory limit.")
    return _section(f"Pins and other constraints ({len(demands)} of your own)", said)


def _memory(plan: Plan) -> str:
    total = plan.memory.peak_bytes or 1
    rows = []
    for name, field in _MEMORY:
        size = getattr(plan.memory, field)
        if not size and field == "kept_parameter_bytes":
            continue
        bar = f'<div class="bar" style="width:{100 * size / total:.1f}%"></div>'
        rows.append(f"<tr><td>{escape(name)}</td><td class=n>{size / GIB:,.2f} GiB</td><td style='width:60%'>{bar}</td></tr>")
    rows.append(f"<tr><td><b>peak</b></td><td class=n><b>{plan.memory.peak_bytes / GIB:,.2f} GiB</b></td>"
                f"<td>{escape(verdict(plan)[0])}</td></tr>")  # fmt: skip
    return _section("Memory per device at the peak", f"<table>{''.join(rows)}</table>",
                    _p("No temporaries and no reserve are counted."))  # fmt: skip


def _volumes(plan: Plan) -> str:
    rows = [(axis, kind, f"{size / GB:,.3f} GB") for axis, kinds in plan.comm_bytes.items() for kind, size in kinds.items()]
    body = _table(("mesh axis", "collective", "full bytes a step, one rank"), rows, (2,)) if rows else _p("Nothing communicates.")
    return _section("Communication by mesh axis", body)


def _hotspots(plan: Plan) -> str:
    found = hotspots.largest(plan, 15)
    rows = [
        (spot.name, f"×{spot.count}", spot.moves, f"{spot.source} to {spot.target}", spot.phase,
         f"{spot.num_bytes / GB:,.2f} GB", f"{spot.us / 1000:,.2f} ms")
        for spot in found
    ]  # fmt: skip
    head = ("tensor", "×", "moves", "placement", "phase", "bytes", "time")
    body = _table(head, rows, (5, 6)) if rows else _p("Nothing is redistributed.")
    return _section("What communicates most", body)


def _difference(a: Plan, b: Plan) -> str:
    refused = compare.refusal(a, b)
    if refused:
        return _section(f"Against base plan {a.plan_id}", _p(refused))
    groups = compare.changed(a, b)
    modules = compare.by_module(a, b)
    parts = [
        _table(("module, all layers", "compute", "communication", "together"),
               [(m.name, *(f"{us / 1000:+,.3f} ms" for us in (m.compute_us, m.comm_us, m.us))) for m in modules], (1, 2, 3)),
        _p(f"{sum(len(g.keys) for g in groups)} tensors lie otherwise, in {len(groups)} groups"
           + (f"; the first {MOST_GROUPS} follow." if len(groups) > MOST_GROUPS else ".")),
        _table(("tensor", "×", "base", "this plan", "time"),
               [(g.name, f"×{len(g.keys)}", g.before, g.after, f"{g.us / 1000:+,.3f} ms") for g in groups[:MOST_GROUPS]], (4,)),
    ]  # fmt: skip
    return _section(f"Against base plan {a.plan_id}", *(_p(text) for text in compare.cautions(a, b)), *parts)


def _parameters(plan: Plan) -> str:
    columns = compare.parameters(plan, plan)
    rows = list(zip(columns["parameter"], columns["×"], columns["A"], strict=True))
    return _section("Stored parameters", _table(("parameter", "×", "placement"), rows))


def _hardware(plan: Plan, profile: HardwareProfile) -> str:
    changed = profile.content_hash != plan.hardware_hash
    notice = [_p("The profile has changed since the plan was priced; its constants now are listed.", "notice")] if changed else []
    rows = [
        (name, f"{constant.value:,.6g}" if isinstance(constant.value, (int, float)) else "table", constant.unit, constant.kind,
         f"{constant.source} ({constant.date})")
        for name, constant in sorted(profile.constants.items())
    ]  # fmt: skip
    table = _table(("constant", "value", "unit", "kind", "source"), rows)
    summary = f"<details><summary>{len(rows)} constants with their sources</summary>{table}</details>"
    return _section(
        "Hardware", _p(f"{profile.title}; profile {plan.hardware_name}, content {plan.hardware_hash}"), *notice, summary
    )


def _origin(plan: Plan) -> str:
    """Where the file comes from, and the plan itself."""
    packed = base64.b64encode(gzip.compress(plan.dumps().encode(), 9, mtime=0)).decode()
    link = (
        f'<p><a download="plan-{escape(plan.plan_id)}.json.gz" href="data:application/gzip;base64,{packed}">'
        "The plan itself, JSON, compressed</a>: the commands and the Export page open it.</p>"
    )
    rows = [
        ("solver", plan.report.method),
        ("step time", f"{plan.report.objective_us / 1000:,.3f} ms, no plan can be under {plan.report.bound_us / 1000:,.3f} ms"),
        ("plan", plan.plan_id),
        ("model fingerprint", plan.fingerprint),
        ("structure fingerprint", plan.structure_fingerprint),
        ("plan schema", str(PLAN_SCHEMA)),
        *((name, _version(name)) for name in ("plan-explorer", "torch")),
    ]
    if plan.replicated_for_lack_of_a_rule:
        rows.append(("replicated for lack of a rule", ", ".join(plan.replicated_for_lack_of_a_rule)))
    not_modelled = (
        "Not modelled: overlap of computation and communication, temporaries, fragmentation, other users of the network."
    )
    return _section("Where this comes from", _table(("", ""), rows), _p(not_modelled), link)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
