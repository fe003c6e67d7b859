"""Setup: what to plan, and the plans that are already there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import opening, state, work
from app.components.headings import heading
from app.components.markup import plain
from app.components.pulse import pulse
from app.view_models import setup_form
from app.view_models.model_source import FORMS, kind_of
from app.view_models.setup_form import SetupForm
from planner import PlannerError, hardware_names, models
from planner.hardware import fabric_names

CHECKPOINTING = (
    "Layers whose forward pass runs again in backward, so that less is kept. auto: as few as the memory budget makes worthwhile."
)
USUAL = "default"
STAGES = ("trace", "strategies and prices", "compile", "solve")


def page() -> None:
    found = state.session()
    left, right = st.columns([2.4, 1], gap="large")
    with left:
        _form(found)
    with right:
        _open(found)


def _form(found: state.Session) -> None:
    slots: dict[str, DeltaGenerator] = {}
    form = _fields(found.form, slots)
    found.form = form
    result = setup_form.read(form, state.model_folders())
    for field, message in result.errors.items():
        slots[field].error(plain(message))
    if result.request is not None:
        request = result.request
        plan = found.document.plan if found.document else None
        stages = ", ".join(setup_form.stages_to_run(request, plan))
        slots["links"].caption(plain(setup_form.links_text(request)))
        batch = request.sized_model.batch or "as the model's code gives it"
        st.caption(plain(f"{request.mesh.num_devices} devices, global batch {batch}. Will run: {stages}."))
    busy = found.running is not None
    if st.button("Trace and solve", type="primary", key="start", disabled=result.request is None or busy):
        assert result.request is not None
        work.start(found, result.request)
        st.rerun()
    st.fragment(_progress)()


def _fields(form: SetupForm, slots: dict[str, DeltaGenerator]) -> SetupForm:
    """The widgets. They are not drawn on other pages, where Streamlit forgets them: they begin again with `form`.

    `slots` gets a place under each field for what is wrong with it.
    """
    _model_fields(form, slots)
    _cluster_fields(form, slots)
    heading("Limits")
    limits = st.columns(4)
    _text(limits[0], "Memory per device", form, "memory", slots, placeholder="what the hardware leaves")
    _select(limits[1], "Optimizer", form, "optimizer", setup_form.OPTIMIZERS)
    _select(limits[2], "Checkpointing", form, "checkpoint", setup_form.CHECKPOINTS, help=CHECKPOINTING)
    _text(limits[3], "Solver time, seconds", form, "time_limit", slots)
    return SetupForm(**{field.name: st.session_state[field.name] or "" for field in fields(form)})


def _cluster_fields(form: SetupForm, slots: dict[str, DeltaGenerator]) -> None:
    heading("Cluster")
    one, two, three, four = st.columns([1.6, 1.2, 1.2, 1])
    _text(one, "Mesh axes, outermost first", form, "mesh", slots, placeholder="dp=8,tp=8")
    _select(two, "Hardware", form, "hardware", hardware_names())
    _select(three, "Network", form, "network", ("", *fabric_names()), format_func=lambda name: name or USUAL)
    _text(four, "Devices per node", form, "gpus_per_node", slots, placeholder="of the hardware")
    slots["links"] = st.empty()
    st.caption("The last axis is the nearest devices. Axes named dp, fsdp, data and so on split the batch.")


def _model_fields(form: SetupForm, slots: dict[str, DeltaGenerator]) -> None:
    about = {model.name: model.description for model in models()}
    heading("Model")
    one, two = st.columns(2)
    with one:
        _select(one, "Sample model", form, "model", tuple(about))
        st.caption(plain(about.get(st.session_state["model"] or "", "")))
    with two:
        _text(two, "Or your own model", form, "custom_model", slots, placeholder=FORMS)
        own = st.session_state["custom_model"].strip()
        st.caption(plain(f"{kind_of(own) or 'A path on this machine'}. Run by a worker process; replaces the sample when given."))
    sizes = st.columns(4)
    _text(sizes[0], "Global batch, sequences", form, "batch", slots, placeholder="of the model" if own else "one per device")
    _text(sizes[1], "Sequence length", form, "seq", slots, placeholder="model default")
    _text(sizes[2], "Layers", form, "layers", slots, placeholder="all")
    _select(sizes[3], "Precision", form, "precision", setup_form.PRECISIONS)


def _text(where: DeltaGenerator, label: str, form: SetupForm, name: str, slots: dict[str, DeltaGenerator], **more: Any) -> None:
    """The value goes along with every run, so that a browser that missed one does not show an empty field."""
    where.text_input(label, value=getattr(form, name), key=name, **more)
    slots[name] = where.empty()


def _select(where: DeltaGenerator, label: str, form: SetupForm, name: str, options: Sequence[str], **more: Any) -> None:
    """What the form has is offered, even if nothing else does."""
    now = getattr(form, name)
    every = list(dict.fromkeys((*options, now)))
    where.selectbox(label, every, index=every.index(now), key=name, **more)


def _progress() -> None:
    """The stages of the run, each with its seconds; Cancel is in the strip."""
    found = state.session()
    running = found.running
    if running is None or running.kind != "start":
        return
    pulse("pulse_progress")
    job = running.job
    done = [stage.name for stage in job.stages]
    share = (len(done) - 1) / len(STAGES) if done else 0.0
    text = "waiting for a free core" if job.waits_for_room else work.elapsed_text(job) or "starting the worker"
    st.progress(min(1.0, max(0.02, share)), text=plain(text))


def _open(found: state.Session) -> None:
    heading("Open")
    with st.container(border=True):
        if opening.demo_available():
            st.markdown("**Demo:** Llama-3-8B, ready to explore")
            if st.button("Open the demo", key="open_demo"):
                opening.open_demo(found)
                found.arrived = True
                st.rerun()
        else:
            st.caption("This installation has no demo plan.")
    for recent in state.workspace().recent()[:8]:
        with st.container(border=True, horizontal=True, vertical_alignment="center"):
            when = datetime.fromtimestamp(recent.changed).strftime("%Y-%m-%d %H:%M")
            st.markdown(f"{plain(recent.name)}  \n:small[{plain(when)}]", width="stretch")
            if st.button("Open", key=f"open_{recent.project}"):
                try:
                    opening.open_recent(found, recent.project, recent.draft)
                    found.arrived = True
                except PlannerError as error:
                    found.error = error
                st.rerun()


if __name__ == "__main__":  # Streamlit runs the file of a page
    page()
