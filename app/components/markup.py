"""Small pieces of HTML for `st.html`, and text that markdown leaves alone. Every name from a model passes through `escape`."""

from __future__ import annotations

import re
from html import escape

from app.view_models.inspector import TensorRow
from app.view_models.status import Quantity, Strip

CHIP_COLOURS = ("#2563eb", "#0f766e", "#7c3aed", "#be185d")
PENDING_COLOUR = "#b45309"

PAGE_STYLE = """
<style>
[data-testid="stMainBlockContainer"] { padding: 4.1rem 1.6rem 2rem; }
[data-testid="stVerticalBlock"] { gap: 0.7rem; }
[data-testid="stMainBlockContainer"] h3 { font-size: 15px; font-weight: 600; padding: 0.35rem 0 0; }
[data-testid="stCaptionContainer"], [data-testid="stCaptionContainer"] p { color: light-dark(#5a5c68, #a8a9b3); opacity: 1; }
.js-plotly-plot .xtick text, .js-plotly-plot .ytick text, .js-plotly-plot .g-xtitle text, .js-plotly-plot .g-ytitle text,
.js-plotly-plot .annotation text { fill: light-dark(#5a5c68, #b4b5be) !important; }
[data-testid="stBaseButton-primary"] { color: light-dark(#ffffff, #0e1117); }
.st-key-panel.st-key-panel { max-height: max(440px, calc(100vh - 205px)); overflow-y: auto; scrollbar-width: thin; }
[class*="st-key-pulse"] { position: absolute; }
.st-key-inspector.st-key-inspector, .st-key-inspector [data-testid="stVerticalBlock"] { gap: 0.45rem; }
.st-key-inspector pre { padding: 0.35rem 0.6rem; }
.st-key-inspector button[data-variant="pills"] { height: 1.65rem; min-height: 1.65rem; padding: 0 0.5rem; }
</style>
"""

STYLE = """
<style>
.px { font-size: 13px; line-height: 1.5; }
.px .chip { display: inline-block; min-width: 27px; text-align: center; border-radius: 4px; padding: 0 5px; margin-right: 3px;
  font-size: 11px; font-weight: 700; line-height: 17px; color: #fff; border: 1px solid transparent; }
.px .chip.r { color: inherit; border-color: color-mix(in srgb, currentColor 45%, transparent); }
.px .good { color: light-dark(#15803d, #4ade80); } .px .bad { color: light-dark(#b91c1c, #f87171); }
.px .soft { opacity: 0.75; }
.px.strip { display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: baseline; }
.px.strip b { font-weight: 600; }
.px table { border-collapse: collapse; width: 100%; font-size: 12.5px; }
.px td, .px th { text-align: left; vertical-align: top; padding: 3px 8px 3px 0; border: 0; }
.px tr + tr td { border-top: 1px solid color-mix(in srgb, currentColor 12%, transparent); }
.px code { font-size: 12px; overflow-wrap: anywhere; background: none; padding: 0; color: inherit; }
.px td.value { white-space: nowrap; }
.px .move { display: block; font-weight: 600; }
.px .lies { float: right; margin-left: 6px; }
.px .shapes { clear: right; }
</style>
"""


def plain(text: str) -> str:
    """Text as it stands, inside markdown: no links, no images, no emphasis."""
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|<>~$:])", r"\\\1", text)


def chips(placements: str) -> str:
    """`S(0)R` as coloured chips; the text is always there."""
    return "".join(_chip(part) for part in re.findall(r"S\(\d+\)|R|P(?:\(\w+\))?", placements))


def _chip(part: str) -> str:
    if part == "R":
        return '<span class="chip r">R</span>'
    colour = PENDING_COLOUR if part[0] == "P" else CHIP_COLOURS[int(part[2:-1]) % 4]
    return f'<span class="chip" style="background:{colour}">{escape(part)}</span>'


def strip(data: Strip) -> str:
    parts = [f"<b>{escape(data.title)}</b>"]
    if data.base:
        parts.append(f'<span class="soft">{escape(data.base)}</span>')
    parts.append(f'<b class="{data.verdict_tone}">{escape(data.verdict)}</b>')
    parts.append(f'<b class="{data.state_tone}">{escape(data.state)}</b>')
    for quantity in data.quantities:
        delta = f' <span class="soft">({escape(quantity.delta_text)})</span>' if quantity.delta_text else ""
        note = ' <span class="soft">serial, no overlap</span>' if quantity.label == "step" else ""
        label = f'<span class="soft">{escape(quantity.label)}</span>'
        parts.append(f'<span title="{escape(quantity.source)}">{label} <b>{escape(quantity.text)}</b>{delta}{note}</span>')
    return (
        f'{STYLE}<div class="px strip" role="status" aria-label="Plan status">{"".join(f"<span>{p}</span>" for p in parts)}</div>'
    )


def tensor_table(rows: tuple[TensorRow, ...], caption: str) -> str:
    """Name, shape, placement and redistribution of each tensor."""
    lines = []
    for row in rows:
        source = f'{chips(row.source)}<span class="soft">becomes</span> ' if row.source else ""
        cost = f'<span class="soft">{row.us:,.0f} µs</span>' if row.us else ""
        shapes = f'<div class="soft shapes">{escape(row.shape)}, local [{escape(row.local)}]</div>'
        lies = f'<span class="lies">{source}{chips(row.placement)}</span>'
        cost = f'<span class="move">{"<br>".join(map(escape, row.steps))} {cost}</span>' if row.steps or cost else ""
        lines.append(f"<tr><td>{lies}<code>{escape(row.name)}</code>{shapes}{cost}</td></tr>")
    return f'{STYLE}<div class="px"><span class="soft">{escape(caption)}</span><table>{"".join(lines)}</table></div>'


def number_table(quantities: tuple[Quantity, ...]) -> str:
    """Name, value and source of each number."""
    rows = "".join(
        f"<tr><td>{escape(q.label)}</td><td class='value'><b>{escape(q.text)}</b></td><td>{escape(q.source)}</td></tr>"
        for q in quantities
    )
    return f'{STYLE}<div class="px"><table>{rows}</table></div>'


def change_row(name: str, before: str, after: str, count: int) -> str:
    times = f" <b>×{count}</b>" if count > 1 else ""
    placements = f'{chips(before) or escape(before)}<span class="soft">becomes</span> {chips(after) or escape(after)}'
    return f'{STYLE}<div class="px"><code>{escape(name)}</code>{times}<br>{placements}</div>'


def demand_row(headline: str, where: str, options: tuple[str, ...], note: str, matches: str) -> str:
    """A pin or another demand: what, its placements, where, how many tensors, why."""
    placements = '<span class="soft">or</span> '.join(f"{chips(text)} " for text in options)
    place = f'<br><code>{escape(where)}</code> <span class="soft">{escape(matches)}</span>' if where else ""
    reason = f'<br><span class="soft">{escape(note)}</span>' if note else ""
    return f'{STYLE}<div class="px"><b>{escape(headline)}</b> {placements}{place}{reason}</div>'


def lines(texts: tuple[str, ...]) -> str:
    """A list in small type."""
    items = "".join(f"<tr><td>{escape(text)}</td></tr>" for text in texts)
    return f'{STYLE}<div class="px"><table>{items}</table></div>'
