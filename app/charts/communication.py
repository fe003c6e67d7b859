"""Figures of the Communication page, from what its view-models return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from app.charts import palette
from app.view_models.communication import short
from app.view_models.timeline import COMPUTE, PHASES, Span

UNIT_TITLES = {"GB": "GB (10⁹ bytes), full buffers of one rank", "ms": "ms, predicted", "count": "calls"}


def number(value: float, unit: str) -> str:
    return f"{value:,.0f}" if unit == "count" else short(value)


def bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> go.Figure:
    """Row -> collective -> amount, as horizontal bars stacked by collective; the sum is written at the end."""
    names = list(rows)
    figure = go.Figure()
    for kind in sorted({kind for kinds in rows.values() for kind in kinds}):
        values = [rows[name].get(kind, 0.0) for name in names]
        figure.add_bar(
            y=names, x=values, name=kind, orientation="h", marker=palette.marker(palette.KINDS[kind], palette.PATTERNS[kind]),
            customdata=[number(v, unit) for v in values],
            hovertemplate=f"%{{y}}<br>{kind}: %{{customdata}} {unit}<extra></extra>",
        )  # fmt: skip
    sums = [sum(rows[name].values()) for name in names]
    figure.add_scatter(
        y=names, x=sums, mode="text", text=[f"  {number(s, unit)} {unit if unit != 'count' else 'calls'}" for s in sums],
        textposition="middle right", showlegend=False, hoverinfo="skip", cliponaxis=False,
    )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(range=[0, 1.18 * max(sums, default=1.0)])
    return palette.finish(figure, height=130 + 26 * len(names), x_title=UNIT_TITLES[unit])


def icicle(tree: Mapping[tuple[str, ...], float], unit: str, top: tuple[str, ...] = ()) -> go.Figure:
    """Paths with their amounts; the id of a box is its path joined with `|`. `top` is the box that fills the width."""
    paths = sorted(tree, key=lambda path: (len(path), -tree[path]))
    figure = go.Figure(
        go.Icicle(
            ids=["|".join(path) or "all" for path in paths], labels=[path[-1] if path else "all" for path in paths],
            parents=["" if not path else "|".join(path[:-1]) or "all" for path in paths], values=[tree[path] for path in paths],
            branchvalues="total", tiling={"orientation": "v"}, maxdepth=5, sort=False,
            text=[f"{number(tree[path], unit)} {unit}" for path in paths], textinfo="label+text",
            hovertemplate="%{id}<br>%{text}, %{percentRoot:.1%} of all<extra></extra>",
            marker={"colors": [_icicle_colour(path) for path in paths], "line": {"width": 1, "color": "rgba(127,127,127,0.4)"}},
            pathbar={"visible": False}, textfont={"color": "#ffffff"}, leaf={"opacity": 1.0}, level="|".join(top) or "all",
        )
    )  # fmt: skip
    figure.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return palette.finish(figure, height=360, legend=False)


def _icicle_colour(path: tuple[str, ...]) -> str:
    return "#4b5563" if len(path) < 2 else {"all_gather": "#3565bf", "all_reduce": "#a85a10", "reduce_scatter": "#1f7a5a"}.get(
        path[1], "#8f3f79"
    )  # fmt: skip


def heat_strip(rows: Mapping[str, Mapping[str, float]], unit: str) -> go.Figure:
    """Axis -> layer -> amount."""
    layers = list(next(iter(rows.values()), {}))
    values = [[row[layer] for layer in layers] for row in rows.values()]
    figure = go.Figure(
        go.Heatmap(
            x=[layer.removeprefix("layer ") for layer in layers], y=list(rows), z=values, colorscale=palette.HEAT, xgap=2, ygap=2,
            customdata=[[f"{layer}: {number(value, unit)}" for layer, value in row.items()] for row in rows.values()],
            hovertemplate=f"%{{y}}, %{{customdata}} {unit}<extra></extra>", zmin=0,
            zmax=max((value for row in values for value in row), default=0.0) or 1.0,
            showscale=False,
        )
    )  # fmt: skip
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed")
    return palette.finish(figure, height=90 + 44 * len(rows), x_title="layer", legend=False)


def timeline(spans: Sequence[Span], lanes: Sequence[str], axis_names: tuple[str, ...]) -> go.Figure:
    """One lane of compute, one per group of mesh axes. What is exposed is hatched: compute stands still meanwhile."""
    figure = go.Figure()
    groups: dict[tuple[str, str, bool], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.lane, span.phase, span.is_exposed), []).append(span)
    order = {lane: number for number, lane in enumerate(lanes)}
    for (lane, phase, exposed), chosen in sorted(groups.items(), key=lambda g: (order[g[0][0]], PHASES.index(g[0][1]), g[0][2])):
        colour = palette.COMPUTE[phase] if lane == COMPUTE else palette.axis_colour(lane, axis_names)
        note = "" if lane == COMPUTE else ", exposed" if exposed else ", beside compute"
        figure.add_bar(
            y=[lane] * len(chosen), orientation="h", width=0.7, name=f"{lane}, {phase}{note}",
            x=[round(s.us / 1000, 4) for s in chosen], base=[round(s.begin_us / 1000, 4) for s in chosen],
            marker={**palette.marker(colour, "/" if exposed else ""), "line": {"width": 0}},
            customdata=[[s.text, f"{s.us / 1000:,.3f} ms{note}", s.key] for s in chosen],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} from %{base:,.2f} ms<extra></extra>",
        )  # fmt: skip
    for phase in PHASES:
        begin = min((span.begin_us for span in spans if span.phase == phase), default=None)
        if begin is not None:
            figure.add_vline(
                x=begin / 1000, line={"width": 1, "dash": "dot", "color": "#888888"}, annotation={"text": phase},
                annotation_position="top left" if phase == PHASES[-1] else "top right", annotation_yshift=20,
            )  # fmt: skip
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(autorange="reversed", type="category")
    palette.finish(figure, height=160 + 46 * len(lanes), legend=False)
    figure.update_xaxes(rangeslider={"visible": True, "thickness": 0.12}, ticksuffix=" ms")
    figure.update_layout(dragmode="zoom", margin={"t": 30})
    return figure
