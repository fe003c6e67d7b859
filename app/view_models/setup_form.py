"""The Setup form: what the user typed -> what is planned, with every mistake named at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from app.view_models.hardware_change import fabric_choice
from app.view_models.model_source import Folders, problem_of
from app.view_models.status import GB, budget_bytes
from planner import InputError, Mesh, ModelRequest, Plan, PlannerError, PlanRequest, check_batch, hardware_profile, parse_bytes
from planner.hardware_changes import joined_name, split_name

T = TypeVar("T")
OPTIMIZERS = ("adamw", "sgd", "none")
PRECISIONS = ("bf16-mixed", "as-traced")
CHECKPOINTS = ("auto", "none", "full")


@dataclass(frozen=True, kw_only=True)
class SetupForm:
    """The fields as typed. Empty text means the default: of the model for sizes, of the hardware for memory, network and devices
    per node."""

    model: str = "llama3-8b"
    custom_model: str = ""
    batch: str = ""
    seq: str = ""
    layers: str = ""
    precision: str = "bf16-mixed"
    mesh: str = "dp=8,tp=8"
    hardware: str = "h100_sxm"
    network: str = ""
    gpus_per_node: str = ""
    optimizer: str = "adamw"
    memory: str = ""
    checkpoint: str = "auto"
    time_limit: str = "60"

    @property
    def model_id(self) -> str:
        return self.custom_model.strip() or self.model


@dataclass(frozen=True, kw_only=True)
class FormResult:
    """Either a request, or what is wrong: field name -> message with its hint."""

    request: PlanRequest | None
    errors: Mapping[str, str]


def form_of(plan: Plan, memory_bytes: int | None, samples: tuple[str, ...]) -> SetupForm:
    """The form that would ask for this plan again."""
    request = plan.request
    is_sample = request.model in samples
    machine, network, factors = split_name(plan.hardware_name)
    usual = plan.gpus_per_node == hardware_profile(plan.hardware_name).gpus_per_node
    return SetupForm(
        model=request.model if is_sample else (samples[0] if samples else ""),
        custom_model="" if is_sample else request.model,
        batch=_text(request.batch), seq=_text(request.seq), layers=_text(request.layers), precision=request.precision,
        mesh=str(plan.mesh), hardware=joined_name(machine, "", factors), network=network,
        gpus_per_node="" if usual else str(plan.gpus_per_node),
        optimizer=plan.memory_policy.optimizer,
        memory="" if memory_bytes is None else f"{memory_bytes / 2**30:g}GiB", checkpoint=plan.checkpoint,
    )  # fmt: skip


def read(form: SetupForm, folders: Folders = None) -> FormResult:
    """`folders`: where models of the user's own may come from, see `model_source`."""
    errors: dict[str, str] = {}
    numbers = {name: _number(getattr(form, name), name, errors) for name in ("batch", "seq", "layers")}
    mesh = _try(errors, "mesh", lambda: Mesh.parse(form.mesh))
    per_node = _number(form.gpus_per_node, "gpus_per_node", errors, "the hardware")
    memory = _try(errors, "memory", lambda: parse_bytes(form.memory)) if form.memory.strip() else None
    limit = _seconds(form.time_limit, errors)
    problem = problem_of(form.model_id, folders)
    if problem:
        errors["custom_model"] = problem
    if errors or mesh is None:
        return FormResult(request=None, errors=errors)
    request = PlanRequest(
        model=ModelRequest(model=form.model_id, precision=form.precision, **numbers),
        mesh=mesh, hardware=fabric_choice(form.hardware, form.network), memory_bytes=memory, optimizer=form.optimizer,
        time_limit_s=limit,
        checkpoint=form.checkpoint, gpus_per_node=per_node or hardware_profile(form.hardware).gpus_per_node,
    )  # fmt: skip
    if _try(errors, "batch", lambda: check_batch(request) or True) is None:
        return FormResult(request=None, errors=errors)
    return FormResult(request=request, errors={})


def stages_to_run(request: PlanRequest, open_plan: Plan | None) -> tuple[str, ...]:
    """Which stages the button will run; the trace is kept if the model and its sizes are those that are open."""
    keep = open_plan is not None and open_plan.request == request.sized_model
    later = ("strategies and prices", "solve")
    return later if keep else ("trace", *later)


def links_text(request: PlanRequest) -> str:
    """Which mesh axes stay inside a node and which cross the network, with the peak rates of the links."""
    profile, mesh = hardware_profile(request.hardware), request.mesh
    per_node = request.gpus_per_node
    spans = {name: math.prod(mesh.axis_sizes[i:]) for i, name in enumerate(mesh.axis_names)}
    near = [name for name, span in spans.items() if span <= per_node]
    far = [name for name, span in spans.items() if span > per_node]
    link = profile.constants["node.link_bytes_per_s"].value / GB
    texts = [
        f"{', '.join(near)} inside a node of {per_node}, {link:,.0f} GB/s per device" if near else "",
        f"{', '.join(far)} across nodes, {profile.fabric.nic_bytes_per_s / GB:,.0f} GB/s per device" if far else "",
    ]
    return f"{'; '.join(text for text in texts if text)}. {profile.title}."


def budget_text(plan: Plan) -> str:
    budget = budget_bytes(plan)
    return "none" if budget is None else f"{budget / 2**30:.1f} GiB"


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _number(text: str, name: str, errors: dict[str, str], whose: str = "the model") -> int | None:
    if not text.strip():
        return None
    if not re.fullmatch(r"\s*\d{1,9}\s*", text) or int(text) < 1:
        errors[name] = f"{text.strip()!r} is not a whole number from 1 up. Leave it empty for the default of {whose}."
        return None
    return int(text)


def _seconds(text: str, errors: dict[str, str]) -> float:
    if not re.fullmatch(r"\s*\d{1,6}(\.\d+)?\s*", text) or float(text) <= 0:
        errors["time_limit"] = f"{text.strip()!r} is not a number of seconds over 0."
        return 60.0
    return float(text)


def _try(errors: dict[str, str], field: str, work: Callable[[], T]) -> T | None:
    try:
        return work()
    except InputError as error:
        errors[field] = describe(error)
        return None


def describe(error: PlannerError) -> str:
    """Message and hint as two sentences."""
    message = error.message[:1].upper() + error.message[1:]
    return f"{message}. {error.hint}" if error.hint else f"{message}."
