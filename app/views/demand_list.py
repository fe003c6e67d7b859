"""The list of demands with undo and redo, and the kinds that are not about one op: recipes, collectives, resharding."""

from __future__ import annotations

import streamlit as st

from app import drafts, state
from app.components import markup
from app.components.markup import plain
from app.view_models import demands
from app.view_models import pins as pins_model
from app.views.pin_panel import is_stale
from planner import ForbidCollective, Recipe, ReshardAfterForward

MOST_NAME = 60
"""Characters of a name."""

AXES_CAPTION = "Axes, outermost first"


def draw(found: state.Session) -> None:
    document = found.document
    assert document is not None
    history = document.history
    _, orphans = pins_model.pinned_keys(document.shown, history.pins)
    with st.container(border=True, key="pins"):
        stale = " · plan is stale" if is_stale(document) else ""
        st.markdown(f"**Pins ({len(history.pins)})**{stale}")
        for number, pin in enumerate(history.pins):
            where = demands.where_of(pin)
            matches = orphans.get(pin) or (_count_text(document, where) if where else "")
            with st.container(horizontal=True, vertical_alignment="center", gap="small"):
                st.html(
                    markup.demand_row(demands.headline(pin), where, demands.options_of(pin), demands.note_of(pin), matches),
                    width="stretch",
                )
                if st.button("Remove", key=f"remove_{number}", type="tertiary"):
                    drafts.set_pins(found, demands.without(history.pins, pin))
                    st.rerun()
        if not history.pins:
            st.caption("Nothing is demanded: the plan is free. Select an op to pin it, or add a recipe.")
        author_field(found)
        with st.container(horizontal=True):
            with st.popover("Add"):
                _recipe_form(found, document)
                _collective_form(found, document)
                _reshard_form(found, document)
            if st.button("Undo", key="undo", disabled=not history.past):
                drafts.undo(found)
                st.rerun()
            if st.button("Redo", key="redo", disabled=not history.future):
                drafts.redo(found)
                st.rerun()
            if st.button("Clear", key="clear", disabled=not history.pins):
                drafts.set_pins(found, ())
                st.rerun()


def author_field(found: state.Session) -> None:
    """Who signs what is demanded, noted and solved from now on."""
    found.author = st.text_input(
        "Your name", found.author, key="author", max_chars=MOST_NAME, placeholder="optional",
        help="Goes with the date into the reasons of pins, the history of plans, the report and the exported file.",
    ).strip()  # fmt: skip


def _count_text(document: state.Document, where: str) -> str:
    count = pins_model.count_matches(document.shown, where)
    return f"×{count}" if count > 1 else ""


def _recipe_form(found: state.Session, document: state.Document) -> None:
    """A recipe as a baseline: what experts write by hand, in its best version."""
    mesh = document.plan.mesh
    st.markdown("**Follow a recipe**")
    name = st.selectbox("Recipe", demands.recipe_names(), format_func=lambda name: demands.RECIPE_NAMES[name], key="recipe")
    picked = st.pills(AXES_CAPTION, mesh.axis_names, selection_mode="multi", default=list(mesh.axis_names), key="recipe_axes")
    axes = tuple(axis for axis in mesh.axis_names if axis in picked)
    note = st.text_input("Reason", key="recipe_note", placeholder="optional, kept with the plan")
    keeps = st.checkbox("Gathered parameters may be kept for backward", key="recipe_keeps", help=demands.KEEPING)
    problem = demands.recipe_problem(name, axes, mesh) if axes else "Pick at least one axis."
    st.caption(plain(problem or demands.recipe_text(name, axes, mesh)))
    if st.button("Add recipe", key="add_recipe", disabled=bool(problem)):
        recipe = Recipe(name=name, axes=axes, may_keep=keeps, note=drafts.signed(found, note))
        drafts.set_pins(found, demands.added(document.history.pins, recipe))
        st.rerun()


def _collective_form(found: state.Session, document: state.Document) -> None:
    st.markdown("**Forbid a collective**")
    kind = st.selectbox(
        "Collective", demands.COLLECTIVES, format_func=lambda kind: "any" if kind == "*" else kind, key="collective"
    )
    axes = ("*", *document.plan.mesh.axis_names)
    axis = st.selectbox("In groups over", axes, index=1, format_func=lambda axis: "any axis" if axis == "*" else axis, key="over")
    note = st.text_input("Reason", key="collective_note", placeholder="optional, kept with the plan")
    if st.button("Forbid it", key="add_collective"):
        demand = ForbidCollective(collective=kind, axis=axis, note=drafts.signed(found, note))
        drafts.set_pins(found, demands.added(document.history.pins, demand))
        st.rerun()


def _reshard_form(found: state.Session, document: state.Document) -> None:
    st.markdown("**Reshard parameters after forward**")
    when = st.selectbox(
        "Reshard", demands.RESHARD, format_func=lambda when: demands.RESHARD[when], key="reshard", help=demands.KEEPING
    )
    note = st.text_input("Reason", key="reshard_note", placeholder="optional, kept with the plan")
    if st.button("Demand it", key="add_reshard"):
        demand = ReshardAfterForward(when=when, note=drafts.signed(found, note))
        drafts.set_pins(found, demands.added(document.history.pins, demand))
        st.rerun()
