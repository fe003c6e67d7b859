"""Tables as HTML for `st.html`: flows between placements, and which slice each device holds. Names pass through `escape`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from app.components.markup import STYLE, chips
from app.view_models.communication import Hotspot, short
from app.view_models.device_grid import Grid
from app.view_models.status import Quantity

GRID_STYLE = """
<style>
.px.grid { overflow-x: auto; } .px.grid table { width: auto; border-collapse: separate; border-spacing: 3px; }
.px.grid td, .px.grid th { border: 0; padding: 3px 7px; font-size: 11.5px; white-space: nowrap; text-align: center; }
.px.grid tr + tr td { border-top: 0; }
.px.grid td { border-radius: 4px; } .px.grid th { font-weight: 600; opacity: 0.8; }
.px.grid .rank { display: block; font-size: 10.5px; opacity: 0.75; }
.px td.num, .px th.num { text-align: right; white-space: nowrap; }
</style>
"""


def flow_table(flows: Iterable[Hotspot]) -> str:
    """Per mesh axis: from which placement to which, by what, how often and how much."""
    rows = [
        f"<tr><td><b>{escape(flow.axis)}</b></td><td>{chips(flow.source)}</td><td>{chips(flow.target)}</td>"
        f'<td>{escape(flow.kind)}</td><td class="num">{flow.count:,}</td><td class="num">{short(flow.num_bytes / 1e9)}</td>'
        f'<td class="num">{short(flow.us / 1000)}</td><td class="num">{flow.bus_bytes_per_s / 1e9:,.0f}</td></tr>'
        for flow in flows
    ]
    names = ("axis", "from", "to", "collective"), ("calls", "GB", "ms", "bus GB/s")
    head = "".join(f"<th>{name}</th>" for name in names[0]) + "".join(f'<th class="num">{name}</th>' for name in names[1])
    return f'{STYLE}{GRID_STYLE}<div class="px"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def device_grid(grid: Grid) -> str:
    """The mesh as a matrix; equal slices have equal shades, and the text says which."""
    head = "".join(f"<th>{escape(name)}</th>" for name in grid.columns)
    rows = []
    for label, cells in grid.rows:
        shown = []
        for cell in cells:
            if cell is None:
                shown.append("<td>…</td>")
                continue
            hue = round(360 * cell.number / max(grid.distinct, 1)) % 360
            part = f"<br>{escape(cell.part)}" if cell.part else ""
            shown.append(
                f'<td style="background:hsl({hue} 65% 50% / 0.22)"><span class="rank">rank {cell.rank}</span>'
                f"{escape(cell.text(grid.shape))}{part}</td>"
            )
        rows.append(f"<tr><th>{escape(label)}</th>{''.join(shown)}</tr>")
    return f'{STYLE}{GRID_STYLE}<div class="px grid"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def number_line(quantities: Iterable[Quantity]) -> str:
    """Numbers side by side; their sources are in the tooltip and in the table beside."""
    parts = "".join(
        f'<span title="{escape(q.source)}"><span class="soft">{escape(q.label)}</span> <b>{escape(q.text)}</b></span>'
        for q in quantities
    )
    return f'{STYLE}<div class="px strip">{parts}</div>'
