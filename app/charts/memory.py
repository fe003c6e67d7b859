"""Figures of the Memory page, from what its view-models return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from app.charts import palette
from app.view_models.memory import Curve

GIB = 2**30
FAR = 3.0
"""A budget of more than so many times the peak is told, not drawn: what is held would be a flat line."""


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:,.2f} MiB"


def categories(parts: Sequence[tuple[str, int]], limits: Mapping[str, int]) -> go.Figure:
    """One stacked bar; each limit is a line with its name."""
    figure = go.Figure()
    for name, num_bytes in parts:
        figure.add_bar(
            y=["device"], x=[num_bytes / GIB], name=f"{name} {size_text(num_bytes)}", orientation="h", textangle=0,
            text=[f"{num_bytes / GIB:,.2f}"],
            insidetextanchor="middle", textposition="inside", textfont={"color": "#ffffff", "size": 13},
            marker={"color": palette.CATEGORIES[name]}, hovertemplate=f"{name}: %{{x:,.2f}} GiB<extra></extra>",
        )  # fmt: skip
    for number, (name, num_bytes) in enumerate(limits.items()):
        figure.add_vline(
            x=num_bytes / GIB, line={"color": palette.LIMIT, "width": 2, "dash": "solid" if number == 0 else "dot"},
            annotation={"text": f"{name} {num_bytes / GIB:,.1f} GiB", "font": {"size": 12}},
            annotation_position="top left", annotation_yshift=18 * (number + 1), annotation_xshift=6,
        )  # fmt: skip
    widest = max([sum(size for _, size in parts), *limits.values()])
    figure.update_layout(barmode="stack", uniformtext={"minsize": 11, "mode": "hide"})
    figure.update_xaxes(range=[0, 1.12 * widest / GIB])
    figure.update_yaxes(visible=False)
    figure = palette.finish(figure, height=215, x_title="GiB (2³⁰ bytes) per device")
    figure.update_layout(legend={"yanchor": "top", "y": -0.75}, margin={"t": 46})
    return figure


def unit_of(num_bytes: float) -> tuple[float, str]:
    """(bytes, name) of the unit for an axis that reaches so far."""
    return (GIB, "GiB") if num_bytes >= 0.1 * GIB else (2**20, "MiB")


def saved(rows: Mapping[str, int], by: str) -> go.Figure:
    """Bytes of saved activations: columns per layer, or rows per module."""
    unit, unit_name = unit_of(max(rows.values(), default=0))
    names, sizes = list(rows), [size / unit for size in rows.values()]
    colour = palette.CATEGORIES["saved activations"]
    if by == "layer":
        figure = go.Figure(
            go.Bar(x=[n.removeprefix("layer ") for n in names], y=sizes, marker={"color": colour},
                   hovertemplate=f"%{{x}}: %{{y:,.3f}} {unit_name}<extra></extra>")
        )  # fmt: skip
        figure.update_xaxes(type="category")
        figure.update_yaxes(title=unit_name)
        return palette.finish(figure, height=300, x_title="layer", legend=False)
    figure = go.Figure(
        go.Bar(y=names, x=sizes, orientation="h", marker={"color": colour}, text=[size_text(size) for size in rows.values()],
               textposition="outside", cliponaxis=False, hovertemplate=f"%{{y}}: %{{x:,.3f}} {unit_name}<extra></extra>")
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(range=[0, 1.45 * max(sizes, default=1.0)])
    return palette.finish(figure, height=70 + 24 * len(names), x_title=f"{unit_name} per device", legend=False)


def live(curve: Curve, limit_bytes: int | None) -> go.Figure:
    """Bytes held over the order of the ops: what stays all step below, what is kept for backward on it; limit and peak marked."""
    last = curve.last + 1
    unit, name = unit_of(curve.peak_bytes)
    nodes, held = [*curve.nodes, last], [*curve.num_bytes, curve.num_bytes[-1]]
    constant = curve.constant_bytes / unit
    keys = [*curve.keys, curve.keys[-1]]
    figure = go.Figure()
    figure.add_scatter(
        x=[0, last], y=[constant, constant], fill="tozeroy", mode="lines", name="parameters, gradients, optimizer state",
        line={"color": palette.CATEGORIES["parameters"], "width": 1}, hovertemplate=f"%{{y:,.2f}} {name} all step<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=nodes, y=[constant + size / unit for size in held], fill="tonexty", name="kept for backward on top",
        mode="lines+markers",  # a line without points cannot be clicked
        marker={"opacity": 0}, selected={"marker": {"opacity": 1, "size": 8}}, unselected={"marker": {"opacity": 0}},
        line={"color": palette.CATEGORIES["saved activations"], "shape": "hv", "width": 1.5}, customdata=keys,
        hovertemplate=f"%{{y:,.2f}} {name} from<br>%{{customdata}}<extra></extra>",
    )  # fmt: skip
    figure.add_vline(x=curve.backward, line={"width": 1, "dash": "dot", "color": "#888888"})
    figure.add_annotation(
        x=curve.backward, y=0, yref="paper", yanchor="bottom", text=" backward", showarrow=False, xanchor="left"
    )
    figure.add_annotation(
        x=curve.backward, y=0, yref="paper", yanchor="bottom", text="forward ", showarrow=False, xanchor="right"
    )
    peak = curve.peak_bytes / unit
    figure.add_annotation(
        x=curve.peak_node, y=peak, text=f"peak {size_text(curve.peak_bytes)}", showarrow=True, arrowhead=2, ax=60, ay=-22
    )
    limit = limit_bytes / unit if limit_bytes is not None else 0.0
    if 0 < limit <= FAR * peak:
        figure.add_hline(
            y=limit, line={"color": palette.LIMIT, "width": 2}, annotation_position="top left",
            annotation={"text": f"budget {(limit_bytes or 0) / GIB:,.1f} GiB"},
        )  # fmt: skip
    elif limit:
        note = f"budget {(limit_bytes or 0) / GIB:,.1f} GiB, far above ↑"
        figure.add_annotation(x=0, xref="paper", y=1, yref="paper", text=note, showarrow=False, xanchor="left", yanchor="top")
    figure.update_yaxes(title=f"{name} per device", range=[0, 1.15 * max(peak, limit if limit <= FAR * peak else 0.0) or 1.0])
    figure = palette.finish(figure, height=340, x_title="ops in the order of the step")
    figure.update_layout(hovermode="x", clickmode="event+select")
    return figure
