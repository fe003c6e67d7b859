"""The op table: the same data as the graph, one row per box, for search, sorting and readers who cannot use the graph."""

from __future__ import annotations

from typing import Any

from app.view_models.graph_messages import DrawnGraph
from app.view_models.placements import placement_of, placements_text
from planner import Plan


def columns(drawn: DrawnGraph, overlay: dict[str, Any], plan: Plan) -> dict[str, list[Any]]:
    """Column name -> values, in execution order; row numbers are box numbers."""
    nodes = drawn.graph.nodes
    backward = drawn.topology["ops"]["backward"]
    shapes = [str(next((m for m in node.outputs if m is not None), "")) for node in nodes]
    shapes += [shapes[p.node] for p in drawn.gradients]
    return {
        "key": list(drawn.keys),
        "placement": [placements_text(placement_of(plan, key)) for key in drawn.keys],
        "was": [overlay["base"].get(key, "") for key in drawn.keys],
        "pinned to": [overlay["pins"].get(key, "") for key in drawn.keys],
        "phase": ["backward" if flag else "forward" for flag in backward],
        "shape": shapes,
        "compute µs": overlay["compute_us"],
        "comm µs": overlay["comm_us"],
        "memory MiB": overlay["memory_mib"],
    }
