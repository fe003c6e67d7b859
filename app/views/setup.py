"""Setup: what to plan, and the plans that are already there."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import opening, state, work
from app.components.markup import plain
from app.components.pulse import pulse
from app.view_models import setup_form
from app.view_models.model_source import FORMS, kind_of
from app.view_models.setup_form import SetupForm
from planner import PlannerError, hardware_names, models

CHECKPOINTING = (
    "Layers whose forward pass runs again in backward, so that less is kept. auto: as few as the memory budget makes worthwhile."
)
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
        st.caption(f"{request.mesh.num_devices} devices, global batch {request.sized_model.batch}. Will run: {plain(stages)}.")
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
    names, profiles = [model.name for model in models()], list(dict.fromkeys((*hardware_names(), form.hardware)))
    for field in fields(form):
        st.session_state.setdefault(field.name, getattr(form, field.name))
    _model_fields(names, slots)
    st.subheader("Cluster")
    cluster = st.columns([2, 1])
    cluster[0].text_input("Mesh axes, outermost first", placeholder="dp=8,tp=8", key="mesh")
    slots["mesh"] = cluster[0].empty()
    cluster[0].caption("The last axis is the nearest devices. Axes named dp, fsdp, data and so on split the batch.")
    cluster[1].selectbox("Hardware", profiles, key="hardware")
    st.subheader("Limits")
    limits = st.columns(4)
    limits[0].text_input("Memory per device", placeholder="what the hardware leaves", key="memory")
    slots["memory"] = limits[0].empty()
    limits[1].selectbox("Optimizer", setup_form.OPTIMIZERS, key="optimizer")
    ways = list(dict.fromkeys((*setup_form.CHECKPOINTS, form.checkpoint)))
    limits[2].selectbox("Checkpointing", ways, key="checkpoint", help=CHECKPOINTING)
    limits[3].text_input("Solver time, seconds", key="time_limit")
    slots["time_limit"] = limits[3].empty()
    return SetupForm(**{field.name: st.session_state[field.name] or "" for field in fields(form)})


def _model_fields(names: list[str], slots: dict[str, DeltaGenerator]) -> None:
    about = {model.name: model.description for model in models()}
    st.subheader("Model")
    one, two = st.columns(2)
    with one:
        model = st.selectbox("Sample model", names, key="model")
        st.caption(plain(about.get(model or "", "")))
    with two:
        own = st.text_input("Or your own model", placeholder=FORMS, key="custom_model").strip()
        slots["custom_model"] = st.empty()
        st.caption(plain(f"{kind_of(own) or 'A path on this machine'}. Run by a worker process; replaces the sample when given."))
    sizes = st.columns(4)
    texts = {"batch": "one per device", "seq": "model default", "layers": "all"}
    labels = {"batch": "Global batch, sequences", "seq": "Sequence length", "layers": "Layers"}
    for column, (name, placeholder) in zip(sizes, texts.items(), strict=False):
        column.text_input(labels[name], placeholder=placeholder, key=name)
        slots[name] = column.empty()
    sizes[3].selectbox("Precision", setup_form.PRECISIONS, key="precision")


def _progress() -> None:
    """The stages of the run, each with its seconds; Cancel is in the strip."""
    found = state.session()
    running = found.running
    if running is None or running.kind != "start":
        return
    pulse("pulse_progress", page=found.page, busy=True)
    job = running.job
    done = [stage.name for stage in job.stages]
    share = (len(done) - 1) / len(STAGES) if done else 0.0
    text = "waiting for a free core" if job.waits_for_room else work.elapsed_text(job) or "starting the worker"
    st.progress(min(1.0, max(0.02, share)), text=plain(text))


def _open(found: state.Session) -> None:
    st.subheader("Open")
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
