"""Step time against memory of every mesh of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from app.charts.waterfall import plain
from planner.sweep import Entry, pareto

FRONT, BEATEN = "#4f46e5", "#94a3b8"
GIB = 2**30
NEAR = 1.5
"""A limit over this many times the largest plan would squeeze the points: it is said in text instead."""


def pareto_chart(entries: Sequence[Entry], budget_bytes: int | None) -> go.Figure:
    """Points that no other beats are joined and dark, others pale; the memory limit is a line. A point carries its mesh. At least
    one entry is solved."""
    solved = [entry for entry in entries if entry.solved and entry.objective_us is not None and entry.peak_bytes is not None]
    front = pareto(solved)
    best = sorted((entry for entry in solved if entry.mesh in front), key=lambda entry: entry.objective_us or 0.0)
    others = [entry for entry in solved if entry.mesh not in front]
    figure = go.Figure(
        [_points(best, "not beaten", FRONT, "lines+markers+text", 11), _points(others, "beaten", BEATEN, "markers", 8)]
    )
    times, peaks = [(entry.objective_us or 0.0) / 1000 for entry in solved], [(entry.peak_bytes or 0) / GIB for entry in solved]
    limit = None if budget_bytes is None else budget_bytes / GIB
    if limit is not None and limit < NEAR * max(peaks):
        peaks.append(limit)
        figure.add_hline(
            y=limit, line={"dash": "dash", "color": "#dc2626", "width": 1.5},
            annotation={"text": f"memory limit {limit:.1f} GiB"},
        )  # fmt: skip
    elif limit is not None:
        text = f"memory limit {limit:.1f} GiB, above the chart"
        figure.add_annotation(text=text, xref="paper", yref="paper", x=1, y=1, showarrow=False)
    figure.update_layout(
        height=380, margin={"l": 8, "r": 16, "t": 24, "b": 40}, legend={"orientation": "h", "y": 1.12},
        xaxis={"title": "step time, ms (the axis does not begin at 0)", "range": _room(times)},
        yaxis={"title": "peak memory, GiB", "range": _room(peaks)},
    )  # fmt: skip
    return figure


def _room(values: Sequence[float]) -> list[float]:
    """Around the values, with room for labels."""
    room = max(0.2 * (max(values) - min(values)), 5e-4 * max(values))
    return [min(values) - room, max(values) + room]


def _points(entries: Sequence[Entry], name: str, colour: str, mode: str, size: int) -> go.Scatter:
    labels = [plain(entry.mesh) for entry in entries]
    return go.Scatter(
        x=[(entry.objective_us or 0.0) / 1000 for entry in entries], y=[(entry.peak_bytes or 0) / GIB for entry in entries],
        text=labels, customdata=[entry.mesh for entry in entries], mode=mode, name=name, textposition="top center",
        marker={"color": colour, "size": size}, line={"color": colour, "width": 1}, textfont={"size": 11},
        hovertemplate="%{text}<br>%{x:,.1f} ms, %{y:.1f} GiB<extra></extra>",
    )  # fmt: skip
