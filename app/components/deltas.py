"""Small HTML of the Compare page: the numbers of two plans with their difference."""

from __future__ import annotations

from html import escape

from app.components.markup import STYLE
from app.view_models.status import Quantity

_STYLE = """
<style>
.px.deltas { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; }
.px.deltas > div { border: 1px solid color-mix(in srgb, currentColor 18%, transparent); border-radius: 8px; padding: 8px 12px; }
.px.deltas .change { font-size: 17px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.px.deltas .from { font-size: 12px; opacity: 0.75; font-variant-numeric: tabular-nums; }
</style>
"""


def deltas(quantities: tuple[Quantity, ...]) -> str:
    """One box a number: `▼ -18.0 ms`, then what A and B have. Less is better in all; colour only repeats the sign."""
    boxes = []
    for q in quantities:
        before = q.value - (q.delta or 0.0)
        tone = "" if not q.delta_text else "good" if (q.delta or 0.0) < 0 else "bad"
        change = f"{q.delta_text} {q.unit}" if q.delta_text else "no difference"
        boxes.append(
            f'<div title="{escape(q.source)}"><span class="soft">{escape(q.label)}</span>'
            f'<div class="change {tone}">{escape(change)}</div>'
            f'<div class="from">A {before:,.{q.digits}f} → B {escape(q.text)}</div></div>'
        )
    return f'{STYLE}{_STYLE}<div class="px deltas" role="group" aria-label="B minus A">{"".join(boxes)}</div>'
