"""The plan graph as one Streamlit component (Components v2): SVG drawn by plan_graph.js, laid out by dagre."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

_HERE = Path(__file__).parent
# Streamlit takes a one-line js, css or html string that contains "/" for a file path, so each keeps a newline inside.
_HTML = '\n<div class="plan-graph"></div>\n'
_SCRIPTS = ("graph_model.js", "graph_layout.js", "minimap.js", "plan_graph.js")


def javascript() -> str:
    """One inline module: dagre.min.js defines a global `dagre`, our files follow, the last one exports the entry point."""
    library = (_HERE / "dagre.min.js").read_text(encoding="utf-8").split("//# sourceMappingURL")[0]
    return "\n".join([library, *((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)])


_component = st.components.v2.component(
    "plan_graph", html=_HTML, css=(_HERE / "plan_graph.css").read_text(encoding="utf-8"), js=javascript()
)


def plan_graph(
    topology: dict[str, Any], overlay: dict[str, Any], *, focus: tuple[str | None, int], key: str
) -> tuple[str | None, tuple[str, ...]]:
    """Draw the graph. Returns the selected key and all selected keys (more than one after Shift-click).

    `focus` is (key, count): the box to open, centre and select whenever the count changes. Use it for a link, a table click,
    or the kept selection after a page switch (component state does not survive one). Leave it alone on a click in the graph:
    any change of `data` sends the whole message again.
    """
    state = _component(
        key=key,
        data={"topology": topology, "overlay": overlay, "focus": {"key": focus[0], "count": focus[1]}},
        default={"selected": None, "group": []},
        on_selected_change=lambda: None,  # a default needs a callback; the return value is what we read
        on_group_change=lambda: None,
    )
    return getattr(state, "selected", None), tuple(getattr(state, "group", None) or ())
