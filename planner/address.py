"""Names of tensors as users write them (WHERE) -> the tensors of a graph."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from planner.errors import InvalidConstraintError
from planner.graph import JointGraph, Node, TensorRef


def glob_regex(where: str) -> re.Pattern[str]:
    """`*` matches one dotted component (or part of one), `**` any number; everything else is literal."""
    parts = re.split(r"(\*\*|\*)", where)
    return re.compile("".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts))


def resolve(where: str, graph: JointGraph) -> tuple[TensorRef, ...]:
    """The tensors that WHERE means.

    Raises:
        InvalidConstraintError: nothing matches; the hint lists the nearest names.
    """
    found = _resolve_pattern(where, graph) if "*" in where else _resolve_name(where, graph)
    if found:
        return tuple(dict.fromkeys(found))
    known = [name for name, _ in _leaf_names(graph)] + list(graph.last_output) + [node.key for node in graph.nodes]
    nearest = difflib.get_close_matches(where.replace("*", "0"), dict.fromkeys(known), n=3, cutoff=0.3)
    raise InvalidConstraintError(
        f"{where!r} matches no parameter, module, op or input of the model",
        hint=f"Nearest: {', '.join(nearest)}." if nearest else "Run `show` on a plan to list the names.",
    )


def _resolve_pattern(where: str, graph: JointGraph) -> list[TensorRef]:
    """First parameters and buffers, then modules, then keys: the first kind that matches anything."""
    pattern = glob_regex(where)
    found = [TensorRef(index, 0) for name, index in _leaf_names(graph) if pattern.fullmatch(name)]
    found = found or [TensorRef(index, 0) for path, index in graph.last_output.items() if pattern.fullmatch(path)]
    return found or [TensorRef(i, 0) for i, node in enumerate(graph.nodes) if _has_output(node) and pattern.fullmatch(node.key)]


def _resolve_name(where: str, graph: JointGraph) -> list[TensorRef]:
    """As _resolve_pattern for a name without `*`, without walking over all names."""
    if where in graph.parameter_by_name:
        return [TensorRef(graph.parameter_by_name[where].node, 0)]
    if f"buffer:{where}" in graph.node_by_key:
        return [TensorRef(graph.node_by_key[f"buffer:{where}"], 0)]
    index = graph.node_by_key.get(where, -1)
    if index >= 0:  # keys hold a `/` or `:`, which module paths do not
        return [TensorRef(index, 0)] if _has_output(graph.nodes[index]) else []
    return [TensorRef(graph.last_output[where], 0)] if where in graph.last_output else []


def _has_output(node: Node) -> bool:
    return bool(node.outputs) and node.outputs[0] is not None


def _leaf_names(graph: JointGraph) -> Iterable[tuple[str, int]]:
    for parameter in graph.parameters:
        for name in parameter.names:
            yield name, parameter.node
    for index, node in enumerate(graph.nodes):
        if node.kind == "buffer":
            yield node.key.removeprefix("buffer:"), index
