"""The stage: `trace(request) -> JointGraph`. Load the model, capture one training step, translate it to plain data."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner import torch_compat
from planner.errors import InputError, PlannerError, TraceError
from planner.graph import JointGraph, ModelRequest, TensorMeta
from planner.tracing.arrange import arrange
from planner.tracing.assemble import StoredBuffer, StoredTensor, assemble
from planner.tracing.capture import Captured, capture_joint
from planner.tracing.convert import Draft, JointDraft, read_joint
from planner.tracing.distributed import communication, refuse_distributed
from planner.tracing.dropout import name_places
from planner.tracing.first_values import RealConstants, ValueRecorder
from planner.tracing.init_rules import InitRecorder
from planner.tracing.locate import error_line
from planner.tracing.sources import Factory, find_factory, sizes_for

_PRECISIONS = ("bf16-mixed", "as-traced")
_SIZES = ("full", "tiny")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What a factory returned, with how its parameters start."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[StoredTensor, ...]
    buffers: tuple[StoredBuffer, ...] = ()


def trace(request: ModelRequest, repeated: tuple[int, ...] | None = None) -> JointGraph:
    """The joint forward/backward graph of one training step. Allocates no parameters.

    `repeated` is that of a graph of the same model at another size, see `planner.tracing.recompute`.

    Raises:
        InputError: unknown model, a size the model does not take, a factory or file that fails.
        UnsupportedOpError: an op that cannot be planned correctly (random, in place, communicating, data-dependent shape).
        TraceError: forward or backward cannot be captured; names the user's line.
    """
    for what, value, known in (("precision", request.precision, _PRECISIONS), ("size", request.size, _SIZES)):
        if value not in known:
            raise InputError(f"{value!r} is not a {what}", hint=f"Use one of {', '.join(known)}.")
    factory = find_factory(request.model)
    loaded = load_model(factory, request)
    refuse_distributed(loaded.module, torch_compat.tree_leaves((loaded.args, loaded.kwargs)))
    symbols, stated_inputs = _plan_facts(loaded.module)
    inputs = tuple(_inputs(loaded, stated_inputs))
    try:
        captured = _capture(loaded, request)
        draft = read_joint(captured.module)
    finally:
        torch_compat.reset_capture()
    _require_gradients(draft, loaded.parameters, captured)
    dropouts = name_places(draft)
    places = arrange(draft, repeated)
    kind = type(loaded.module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    graph = assemble(
        draft,
        request,
        parameters=loaded.parameters,
        buffers=loaded.buffers,
        inputs=inputs,
        symbols=symbols,
        class_name=name,
        stand_in_loss=captured.has_stand_in_loss,
        dropouts=dropouts,
        repeated=places,
    )
    graph.check()
    return graph


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Capture makes millions of objects that all stay alive until it ends; collecting in between took 15 % of a deep trace."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_model(factory: Factory, request: ModelRequest) -> LoadedModel:
    """Call the factory on the meta device; a factory that needs real numbers (`.item()`) is called once more without it."""
    sizes = sizes_for(factory, request)
    try:
        made, recorder, tape = _call(factory, sizes, device="meta")
    except PlannerError:
        raise
    except Exception:
        try:
            made, recorder, tape = _call(factory, sizes, device="cpu")
        except Exception as error:
            raise InputError(
                f"the factory of {request.model} fails: {type(error).__name__}: {error}{_at(error)}",
                hint="It has to run on its own: call it in Python with the same sizes.",
            ) from error
    module, args, kwargs = parts_of(made, request.model)
    return LoadedModel(
        module=module,
        args=args,
        kwargs=kwargs,
        parameters=tuple(_stored(module, recorder)),
        buffers=tuple(_stored_buffers(module, recorder, tape)),
    )


def _call(factory: Factory, sizes: Mapping[str, Any], *, device: str) -> tuple[Any, InitRecorder, ValueRecorder]:
    recorder, tape = InitRecorder(), ValueRecorder()
    with torch.random.fork_rng(devices=[]), torch.device(device), RealConstants(device), recorder, tape:
        return factory(**sizes), recorder, tape


def parts_of(made: Any, model: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What a factory returned, as (module, args, kwargs). Raises InputError naming what it returned instead."""
    if isinstance(made, tuple) and 2 <= len(made) <= 3 and isinstance(made[0], nn.Module):
        args, kwargs = made[1], (made[2] if len(made) == 3 else {})
        if isinstance(args, tuple | list) and isinstance(kwargs, dict):
            return made[0], tuple(args), kwargs
    parts = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
    raise InputError(
        f"the factory of {model} returns ({parts})",
        hint="Return (module, args) or (module, args, kwargs): an nn.Module, a tuple of inputs, a dict of named inputs.",
    )


def _stored(module: nn.Module, recorder: InitRecorder) -> Iterator[StoredTensor]:
    """One entry per parameter; names that share a tensor are listed together."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    for number, parameter in tensors.items():
        meta = TensorMeta(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        yield StoredTensor(
            names=tuple(names[number]), meta=meta, init=recorder.rule(parameter), trainable=parameter.requires_grad
        )


def _stored_buffers(module: nn.Module, recorder: InitRecorder, tape: ValueRecorder) -> Iterator[StoredBuffer]:
    """One entry per buffer; names that share a tensor are listed together."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
        tensors[id(buffer)] = buffer
    for number, buffer in tensors.items():
        first_value, unknown = tape.first_value(buffer, recorder.rule(buffer))
        persistent = any(_is_persistent(module, name) for name in names[number])
        yield StoredBuffer(names=tuple(names[number]), first_value=first_value, unknown=unknown, persistent=persistent)


def _is_persistent(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last not in module.get_submodule(owner)._non_persistent_buffers_set


def _capture(loaded: LoadedModel, request: ModelRequest) -> Captured:
    try:
        with torch_compat.quiet():
            return capture_joint(loaded.module, loaded.args, loaded.kwargs, precision=request.precision)
    except PlannerError:
        raise
    except Exception as error:
        refusal = communication(loaded.module, error)
        if refusal is not None:
            raise refusal from error
        raise TraceError(
            f"{request.model} cannot be traced: {torch_compat.error_summary(error)}{_at(error)}",
            hint=_hint(error),
            details={"error": str(error)},
        ) from error


def _at(error: BaseException) -> str:
    line = error_line(error)
    return f" ({line})" if line else ""


def _hint(error: BaseException) -> str:
    if "values of tensors" in torch_compat.error_summary(error):
        return "What forward does must not depend on values of tensors (no if, while or .item() on them); use torch.where."
    if "RNN, GRU, or LSTM" in str(error):
        return "Recurrent modules of torch cannot be traced; write the recurrence in forward with linears and pointwise ops."
    return "Run module(*args) on its own with the same sizes; if that works, the line uses something that cannot be traced."


# ---- what the model states about itself --------------------------------------------------------------------------------
def _plan_facts(module: nn.Module) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    state_sizes, state_inputs = getattr(module, "plan_sizes", None), getattr(module, "plan_inputs", None)
    sizes: Any = state_sizes() if callable(state_sizes) else {}
    inputs: Any = state_inputs() if callable(state_inputs) else {}
    if not all(isinstance(k, str) and k.isidentifier() and isinstance(v, int) and v > 0 for k, v in sizes.items()):
        raise InputError(f"plan_sizes() returns {sizes!r}", hint='Return names and positive whole numbers: {"B": 64, "S": 8192}.')
    return dict(sizes), dict(inputs)


def _inputs(loaded: LoadedModel, stated: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, str, int | None, int | None]]:
    """(position in the flattened call, name, batch dim, bound of values) of each input tensor.

    Without a statement of the model, dim 0 is the batch of every input whose dim 0 is as large as that of the first tensor.
    """
    leaves = list(named_leaves(loaded))
    first = next((leaf.shape[0] for _, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    for position, (name, leaf) in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        facts = stated.get(name, {})
        guess = 0 if leaf.dim() and leaf.shape[0] == first else None
        yield position, name, facts.get("batch_dim", guess), facts.get("high")


def named_leaves(loaded: LoadedModel) -> Iterator[tuple[str, Any]]:
    """Leaves of (args, kwargs) in torch's order, named by the parameters of forward: `tokens`, `batch.x`."""
    parameters = inspect.signature(loaded.module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest_name = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    for (in_kwargs, first, *rest), leaf in torch_compat.leaves_with_path((loaded.args, loaded.kwargs)):
        if in_kwargs == "1":
            base = first
        else:
            position = int(first)
            base = names[position] if position < len(names) else f"{rest_name}.{position - len(names)}"
        yield ".".join([base, *rest]), leaf


def _require_gradients(draft: JointDraft, parameters: tuple[StoredTensor, ...], captured: Captured) -> None:
    """Every trainable parameter that reaches the loss through floating-point ops has a gradient.

    Guards against losing the backward silently. Paths through `detach` do not count, nor anything if the user switched
    gradients off for a region of forward.
    """
    if not draft.gradients:
        raise TraceError(
            "no parameter influences what the model returns",
            hint="Return a loss, or tensors, computed from parameters that require gradients.",
        )
    if captured.has_no_grad_region:
        return
    assert draft.loss is not None
    reached: set[Draft] = set()
    stack = [draft.loss]
    while stack:
        producer, output = use = stack.pop()
        meta = producer.outputs[output]
        if producer in reached or use in draft.detached or meta is None or not meta.is_floating:
            continue
        reached.add(producer)
        stack.extend(producer.operands)
    missing = [
        p.names[0]
        for p in parameters
        if p.trainable
        and any(draft.parameters.get(name) in reached for name in p.names)
        and not any(name in draft.gradients for name in p.names)
    ]
    if missing:
        raise TraceError(
            f"the trace has no gradient for {', '.join(missing)}", hint="An op on the way to the loss has no derivative."
        )
