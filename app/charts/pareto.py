"""Step time against memory of every mesh of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from app.charts.waterfall import plain
from planner.sweep import Entry, pareto

FRONT, BEATEN = "#4f46e5", "#94a3b8"
GIB = 2**30


def pareto_chart(entries: Sequence[Entry], budget_bytes: int | None) -> go.Figure:
    """Points that no other beats are joined and dark, others pale; the memory limit is a line. A point carries its mesh."""
    solved = [entry for entry in entries if entry.solved and entry.objective_us is not None and entry.peak_bytes is not None]
    front = pareto(solved)
    best = sorted((entry for entry in solved if entry.mesh in front), key=lambda entry: entry.objective_us or 0.0)
    others = [entry for entry in solved if entry.mesh not in front]
    figure = go.Figure(
        [_points(best, "not beaten", FRONT, "lines+markers+text", 11), _points(others, "beaten", BEATEN, "markers+text", 8)]
    )
    if budget_bytes is not None:
        figure.add_hline(
            y=budget_bytes / GIB, line={"dash": "dash", "color": "#dc2626", "width": 1.5},
            annotation={"text": f"memory limit {budget_bytes / GIB:.1f} GiB"},
        )  # fmt: skip
    figure.update_layout(
        height=380, margin={"l": 8, "r": 16, "t": 24, "b": 40}, legend={"orientation": "h", "y": 1.12},
        xaxis={"title": "step time, ms", "rangemode": "tozero"}, yaxis={"title": "peak memory, GiB", "rangemode": "tozero"},
    )  # fmt: skip
    return figure


def _points(entries: Sequence[Entry], name: str, colour: str, mode: str, size: int) -> go.Scatter:
    labels = [plain(entry.mesh) for entry in entries]
    return go.Scatter(
        x=[(entry.objective_us or 0.0) / 1000 for entry in entries], y=[(entry.peak_bytes or 0) / GIB for entry in entries],
        text=labels, customdata=[entry.mesh for entry in entries], mode=mode, name=name, textposition="top center",
        marker={"color": colour, "size": size}, line={"color": colour, "width": 1}, textfont={"size": 11},
        hovertemplate="%{text}<br>%{x:,.1f} ms, %{y:.1f} GiB<extra></extra>",
    )  # fmt: skip
