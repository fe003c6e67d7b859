"""Waterfall of a difference: one bar per module, from nothing to the whole."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from app.view_models.compare import ModuleDelta

SLOWER, FASTER, TOTAL = "#d97706", "#2563eb", "#64748b"


def signed(us: float) -> str:
    """`+1.20 ms`"""
    digits = 1 if abs(us) >= 100_000 else 2 if abs(us) >= 100 else 4
    return f"{us / 1000:+,.{digits}f} ms"


def waterfall(rows: Sequence[ModuleDelta]) -> go.Figure:
    """Bars say their sign in text, so that colour only repeats it."""
    names = [*(row.name for row in rows), "B - A"]
    values = [*(row.us / 1000 for row in rows), 0.0]
    total = sum(row.us for row in rows)
    texts = [*(signed(row.us) for row in rows), signed(total)]
    parts = [f"compute {signed(row.compute_us)}<br>communication {signed(row.comm_us)}" for row in rows]
    figure = go.Figure(
        go.Waterfall(
            orientation="h", y=list(range(len(names))), x=values, text=texts, textposition="outside", cliponaxis=False,
            measure=["relative"] * len(rows) + ["total"], customdata=[*parts, "whole difference"],
            hovertemplate="%{customdata}<extra></extra>", increasing={"marker": {"color": SLOWER}},
            decreasing={"marker": {"color": FASTER}}, totals={"marker": {"color": TOTAL}},
            connector={"line": {"width": 1, "color": "rgba(128,128,128,0.5)"}},
        )
    )  # fmt: skip
    figure.update_layout(
        height=90 + 27 * len(names), margin={"l": 8, "r": 16, "t": 8, "b": 40}, showlegend=False, bargap=0.35,
        xaxis={"title": "ms, B - A", "zeroline": True, "range": _room(values[:-1])},
        yaxis={
            "autorange": "reversed", "tickvals": list(range(len(names))), "ticktext": [plain(name) for name in names],
            "automargin": True,
        },
    )  # fmt: skip
    return figure


def plain(name: str) -> str:
    """Plotly reads a little HTML in labels: names are text."""
    short = name if len(name) <= 46 else f"{name[:20]}…{name[-25:]}"
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _room(values: Sequence[float]) -> list[float]:
    """The path of the bars, with room for the texts at both sides."""
    at, low, high = 0.0, 0.0, 0.0
    for value in values:
        at += value
        low, high = min(low, at), max(high, at)
    room = 0.22 * (high - low or 1.0)
    return [low - room, high + room]
