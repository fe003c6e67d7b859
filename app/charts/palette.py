"""Colours of charts, with a pattern beside each, readable on light and dark. Text says the same everywhere."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

KINDS = {"all_gather": "#4f7fd9", "all_reduce": "#d9822b", "reduce_scatter": "#2f9e77", "all_to_all": "#b5579c"}
PATTERNS = {"all_gather": "", "all_reduce": "/", "reduce_scatter": ".", "all_to_all": "x"}
AXES = ("#6366f1", "#ea7c1e", "#2f9e44", "#c026d3")
"""Mesh axes in order; groups of several axes are grey."""
GROUP = "#7d8590"
CATEGORIES = {
    "parameters": "#4f7fd9", "gradients": "#2f9e77", "optimizer state": "#8b6fd1", "saved activations": "#d9822b",
    "kept parameters": "#b5579c",
}  # fmt: skip
CATEGORY_PATTERNS = {"parameters": "", "gradients": ".", "optimizer state": "x", "saved activations": "/", "kept parameters": "+"}
LIMIT = "#dc4c4c"
COMPUTE = {"forward": "#7c8db5", "backward": "#98a2b8", "optimizer": "#8b6fd1"}
HEAT = [[0.0, "rgba(99,102,241,0.06)"], [1.0, "rgba(99,102,241,1)"]]


def axis_colour(lane: str, axis_names: tuple[str, ...]) -> str:
    """Of mesh axes, whose links may be named after a comma."""
    lane = lane.partition(",")[0]
    return AXES[axis_names.index(lane) % len(AXES)] if lane in axis_names else GROUP


def marker(colour: str, pattern: str) -> dict[str, Any]:
    """A filled bar with a light pattern on it."""
    if not pattern:
        return {"color": colour}
    lines = {"shape": pattern, "size": 6, "solidity": 0.25, "fgcolor": "rgba(255,255,255,0.6)", "bgcolor": colour}
    return {"color": colour, "pattern": {**lines, "fillmode": "overlay"}}


def finish(figure: go.Figure, *, height: int, x_title: str = "", legend: bool = True) -> go.Figure:
    """Sizes and margins that all charts share."""
    figure.update_layout(
        height=height, margin={"l": 8, "r": 16, "t": 34 if legend else 10, "b": 8}, showlegend=legend, bargap=0.3,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0.0, "traceorder": "normal"},
        font={"size": 13}, hoverlabel={"align": "left"}, dragmode=False,
    )  # fmt: skip
    figure.update_xaxes(title={"text": x_title, "standoff": 14}, automargin=True, rangemode="tozero")
    figure.update_yaxes(automargin=True)
    return figure
