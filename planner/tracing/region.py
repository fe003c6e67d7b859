"""User-controlled regions in a trace: a `local_map` of the user becomes ONE op forward and ONE op backward, on whole tensors.

`local_map(function, out_placements, in_placements, in_grad_placements, device_mesh)` states, per mesh axis, in which placements a
function of local tensors is run. The trace does not look inside: `planner::region` carries the contract as text and calls the
function, on one device here (a parameter `mesh` stays None), on pieces in the exported file. Its backward runs the function again
and differentiates it. Importing this file registers the two ops with torch.

What `local_map` cannot say, a module may: `plan_regions() -> {"function": {...}}` with any of

    "axes": ("dp", "ep")        names of the mesh axes that the placements speak about, in order. Without them the names of
                                `device_mesh`; without one, placements are by position, one for every axis of the mesh.
    "elsewhere": [{"in": (...), "out": (...), "in_grad": (...)}]
                                rows allowed on any other axis besides copies, one torch placement per tensor.
    "collectives": {"forward": {"all_to_all@ep": bytes}, "backward": {...}}
                                communication inside, in bytes of the whole tensor exchanged; `{}` states that there is none.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from planner import torch_compat
from planner.errors import TraceError
from planner.placement import P_MAX, S0, P, R
from planner.region import Codes, Region, RegionRow, StatedCollective
from planner.tracing.locate import error_line

_KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
_FACTS = {"axes", "elsewhere", "collectives"}
_USER_FILE = re.compile(r"planner_user_(\w+)_[0-9a-f]{12}")


# ---- the two operators --------------------------------------------------------------------------------------------------
@torch.library.custom_op("planner::region", mutates_args=())
def region(contract: str, operands: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [_own(made) for made in _run(contract, operands)]


@region.register_fake
def _shapes(contract: str, operands: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [made.new_empty(made.shape) for made in _run(contract, operands)]


@torch.library.custom_op("planner::region_backward", mutates_args=())
def region_backward(
    contract: str, gradients: Sequence[Tensor], operands: Sequence[Tensor], wanted: Sequence[int]
) -> list[Tensor]:
    with torch_compat.autograd_inside_operator(), torch.enable_grad():
        leaves = [x.detach().requires_grad_(number in wanted) for number, x in enumerate(operands)]
        made = [out for out in _run(contract, leaves) if out.is_floating_point()]
        found = torch.autograd.grad(
            made, [leaves[number] for number in wanted], list(gradients), allow_unused=True, materialize_grads=True
        )
    return [_own(gradient) for gradient in found]


@region_backward.register_fake
def _gradient_shapes(
    contract: str, gradients: Sequence[Tensor], operands: Sequence[Tensor], wanted: Sequence[int]
) -> list[Tensor]:
    return [operands[number].new_empty(operands[number].shape) for number in wanted]


def _save(ctx: Any, inputs: tuple[str, Sequence[Tensor]], output: list[Tensor]) -> None:
    ctx.contract = inputs[0]
    ctx.made = [(made.shape, made.dtype) if made.is_floating_point() else None for made in output]
    ctx.save_for_backward(*inputs[1])


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    operands = ctx.saved_tensors
    needed = ctx.needs_input_grad[1]
    wanted = [n for n, x in enumerate(operands) if x.is_floating_point() and (needed if isinstance(needed, bool) else needed[n])]
    given = [
        torch.zeros(made[0], dtype=made[1]) if gradient is None else gradient
        for gradient, made in zip(gradients, ctx.made, strict=True)
        if made is not None
    ]
    found = iter(region_backward(ctx.contract, given, list(operands), wanted))
    return None, [next(found) if number in wanted else None for number in range(len(operands))]


region.register_autograd(_backward, setup_context=_save)


def _own(made: Tensor) -> Tensor:
    """Contiguous, and no view of an operand."""
    return made.detach().clone(memory_format=torch.contiguous_format)


def _run(contract: str, operands: Sequence[Tensor]) -> list[Tensor]:
    made = call(Region.loads(contract), operands)
    return list(made) if isinstance(made, tuple | list) else [made]


def call(stated: Region, operands: Sequence[Tensor]) -> Any:
    """The user's function on these tensors, on one device."""
    module = sys.modules.get(stated.module) or importlib.import_module(stated.module)
    function = getattr(module, stated.function)
    arguments: list[Any] = list(operands)
    for position, value in stated.constants:
        arguments.insert(position, value)
    return function(*arguments, **dict(stated.keywords))


def published(contract: str) -> str:
    """The contract with the name under which an exported file imports the function: a user's file by its own name."""
    stated = Region.loads(contract)
    return replace(stated, module=published_module(stated.module)).dumps()


def published_module(name: str) -> str:
    """A module as an exported file imports it: a user's file by its own name."""
    return _USER_FILE.sub(r"\1", name)


# ---- from `local_map` to a contract -------------------------------------------------------------------------------------
def stated_regions(module: nn.Module) -> dict[str, Mapping[str, Any]]:
    """What the user's module says about its regions, by the name of the function. Raises TraceError if it is malformed."""
    state = getattr(module, "plan_regions", None)
    facts: Any = state() if callable(state) else {}
    if not isinstance(facts, dict) or not all(isinstance(f, Mapping) and set(f) <= _FACTS for f in facts.values()):
        raise TraceError(
            f"plan_regions() returns {facts!r}",
            hint=f"Return a dict from the name of the region's function to a dict with any of {', '.join(sorted(_FACTS))}.",
        )
    return dict(facts)


@dataclass(frozen=True, kw_only=True)
class RegionReader:
    """Makes the contract of each `local_map` that a capture meets; `facts` by function name."""

    facts: Mapping[str, Mapping[str, Any]]

    def read(self, found: torch_compat.LocalMapCall) -> tuple[Callable[..., Any], str, bool]:
        """(what stands for the region in the captured graph, its contract, whether it returns one tensor alone)."""
        name = getattr(found.function, "__name__", repr(found.function))
        self._check_importable(found.function, name)
        facts = self.facts.get(name, {})
        tensors = [value for value in found.arguments if isinstance(value, Tensor)]
        stated = Region(
            module=found.function.__module__,
            function=name,
            axes=self._axes(found, facts, name),
            rows=(RegionRow(operands=(), gradients=(), outputs=()),),
            constants=tuple((at, _constant(v, name)) for at, v in enumerate(found.arguments) if not isinstance(v, Tensor)),
            keywords=tuple((key, _constant(value, name)) for key, value in found.keywords.items()),
            takes_mesh="mesh" in inspect.signature(found.function).parameters,
            collectives=_stated_collectives(facts.get("collectives"), name),
        )
        made, forward, backward = self._measure(stated, tensors, found.mode)
        outputs = list(made) if isinstance(made, tuple | list) else [made]
        rows = self._rows(found, tensors, outputs, name)
        if stated.axes is not None and len(stated.axes) != len(rows):
            raise _refusal(name, f"places tensors on {len(rows)} mesh axes, and names {len(stated.axes)}")
        elsewhere = tuple(_allowed_row(row, tensors, outputs, name) for row in facts.get("elsewhere", ()))
        whole = tuple(number for number, out in enumerate(outputs) if not out.is_floating_point())
        stated = replace(
            stated, rows=rows, elsewhere=elsewhere, without_gradient=whole, flops=forward, backward_flops=backward
        )  # fmt: skip
        return torch.ops.planner.region.default, stated.dumps(), not isinstance(made, tuple | list)

    @staticmethod
    def _check_importable(function: Any, name: str) -> None:
        """An exported file imports the function by module and name."""
        module = sys.modules.get(getattr(function, "__module__", ""))
        held = getattr(module, name, None)
        wrapped = held.args[0] if isinstance(held, functools.partial) and held.args else held
        if module is None or module.__name__ == "__main__" or wrapped is not function:
            raise _refusal(
                str(name),
                "cannot be imported by an exported file: it is a lambda, a method, or defined inside another function",
                hint="Define the function at the top level of a file, and hand it everything it needs as arguments.",
            )

    @staticmethod
    def _axes(found: torch_compat.LocalMapCall, facts: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
        axes = facts.get("axes") or getattr(found.device_mesh, "mesh_dim_names", None)
        if axes is None:
            return None
        if isinstance(axes, str) or not all(isinstance(axis, str) for axis in axes) or len(set(axes)) != len(tuple(axes)):
            raise _refusal(name, f"names the mesh axes {axes!r}", hint='Give them as a tuple of names: ("dp", "ep").')
        return tuple(axes)

    @staticmethod
    def _measure(stated: Region, tensors: Sequence[Tensor], mode: Any) -> tuple[Any, float, float]:
        """(what the function returns for whole tensors, its FLOPs, those of its backward, which runs it again)."""
        name = stated.function
        leaves = [_leaf(x, mode) for x in tensors]
        versions = [x._version for x in leaves]
        try:
            with mode, torch.enable_grad(), _NoRandomNumbers(name):
                with FlopCounterMode(display=False, custom_mapping=_FLOPS) as forward:
                    made = call(stated, leaves)
                outputs = list(made) if isinstance(made, tuple | list) else [made]
                if not outputs or not all(isinstance(out, Tensor) for out in outputs):
                    raise _refusal(name, "returns something else than a tensor or a flat tuple of tensors")
                trained = [out for out in outputs if out.is_floating_point() and out.requires_grad]
                inputs = [leaf for leaf in leaves if leaf.requires_grad]
                with FlopCounterMode(display=False, custom_mapping=_FLOPS) as backward:
                    if trained and inputs:
                        torch.autograd.grad(trained, inputs, [torch.ones_like(out) for out in trained], allow_unused=True)
        except TraceError:
            raise
        except Exception as error:
            line = error_line(error)
            raise _refusal(
                name,
                f"fails on whole tensors, on one device: {type(error).__name__}: {error}" + (f" ({line})" if line else ""),
                hint="Outside the exported file a region runs on whole tensors, its parameter `mesh` at its default: it has to "
                "do there what it does on pieces of a mesh, without communication.",
            ) from error
        if versions != [x._version for x in leaves]:
            raise _refusal(name, "changes an argument in place", hint="Return new tensors.")
        once = float(forward.get_total_flops())
        return made, once, once + float(backward.get_total_flops())

    @staticmethod
    def _rows(
        found: torch_compat.LocalMapCall, tensors: Sequence[Tensor], outputs: Sequence[Tensor], name: str
    ) -> tuple[RegionRow, ...]:
        if found.in_placements is None:
            raise _refusal(name, "states no in_placements", hint="Give local_map in_placements, one entry for every argument.")
        listed = list(found.in_placements)
        if len(listed) != len(found.arguments):
            raise _refusal(name, f"states in_placements for {len(listed)} arguments and is called with {len(found.arguments)}")
        at = [position for position, value in enumerate(found.arguments) if isinstance(value, Tensor)]
        operands = [listed[position] for position in at]
        gradients = operands if found.in_grad_placements is None else [list(found.in_grad_placements)[p] for p in at]
        made = _per_output(found.out_placements)
        if len(made) != len(outputs):
            raise _refusal(name, f"states out_placements for {len(made)} outputs and returns {len(outputs)}")
        every = [*operands, *gradients, *made]
        if any(p is None or isinstance(p, str) or not hasattr(p, "__len__") for p in every):
            raise _refusal(name, "places a tensor nowhere", hint="Give every tensor one placement per mesh axis.")
        if not every or len({len(p) for p in every}) != 1 or not len(every[0]):
            raise _refusal(name, "gives its tensors placements on different numbers of mesh axes")
        return tuple(
            _row(
                [p[axis] for p in operands], [p[axis] for p in gradients], [p[axis] for p in made], tensors, outputs, name
            )
            for axis in range(len(every[0]))
        )  # fmt: skip


def _attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **kwargs: Any) -> float:
    """Shapes of q, k, v, then dropout and whether it is causal: half the square counts."""
    causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    return 4.0 * math.prod(q) * k[-2] * (0.5 if causal else 1.0)


def _attention_backward_flops(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dropout: float, causal: bool, **kwargs: Any
) -> float:
    return 2.5 * _attention_flops(q, k, v, dropout, causal)


_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""What torch's counter does not know: attention as the CPU runs it."""


def _leaf(x: Tensor, mode: Any) -> Tensor:
    with mode:
        return torch.empty(x.shape, dtype=x.dtype).requires_grad_(x.is_floating_point())


class _NoRandomNumbers(torch_compat.dispatch_mode_class()):  # type: ignore[misc]
    """Refuses random numbers: backward runs the function again, and would draw others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = torch.Tag.nondeterministic_seeded in func.tags and "dropout_p" not in str(func._schema)
        if drawn:
            raise _refusal(self.name, f"draws random numbers ({func})", hint="Draw them outside and hand them in.")
        return func(*args, **(kwargs or {}))


def _per_output(placements: Any) -> list[Any]:
    """`local_map` takes a tuple for one entry per output, anything else for the placements of a single output."""
    if isinstance(placements, tuple) and not any(torch_compat.is_placement(p) for p in placements):
        return list(placements)
    return [placements]


def _allowed_row(stated: Any, tensors: Sequence[Tensor], outputs: Sequence[Tensor], name: str) -> RegionRow:
    if not isinstance(stated, Mapping) or not {"in", "out"} <= set(stated) <= {"in", "out", "in_grad"}:
        raise _refusal(name, f"allows elsewhere {stated!r}", hint='Give dicts with "in", "out" and, if it differs, "in_grad".')
    inside, out = tuple(stated["in"]), stated["out"]
    out = tuple(out) if isinstance(out, tuple | list) else (out,)
    gradients = tuple(stated.get("in_grad", inside))
    if (len(inside), len(gradients), len(out)) != (len(tensors), len(tensors), len(outputs)):
        raise _refusal(
            name, f"allows elsewhere {len(inside)} operands, {len(gradients)} gradients and {len(out)} outputs; it has "
            f"{len(tensors)} tensors and {len(outputs)} outputs",
        )  # fmt: skip
    return _row(inside, gradients, out, tensors, outputs, name)


def _row(
    operands: Sequence[Any],
    gradients: Sequence[Any],
    made: Sequence[Any],
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str,
) -> RegionRow:
    """Placements on one axis, checked against the shapes. The gradient of a pending sum is whole."""
    inside = _codes(operands, tensors, name, "argument")
    stated = _codes(gradients, tensors, name, "the gradient of argument")
    return RegionRow(
        operands=inside,
        gradients=tuple(R if own == P == code else code for own, code in zip(inside, stated, strict=True)),
        outputs=_codes(made, outputs, name, "output"),
    )


def _codes(placements: Sequence[Any], tensors: Sequence[Tensor], name: str, what: str) -> Codes:
    return tuple(
        _code(placement, x, name, f"{what} {n}") for n, (placement, x) in enumerate(zip(placements, tensors, strict=True))
    )


def _code(placement: Any, x: Tensor, name: str, what: str) -> int:
    code = torch_compat.placement_code(placement)
    if code is None or code == P_MAX:
        raise _refusal(name, f"places {what} as {placement!r}", hint="Use Replicate(), Shard(dim) or Partial().")
    if code == P and not x.is_floating_point():
        raise _refusal(name, f"places {what} as a pending sum, but it holds {x.dtype}")
    dim = getattr(placement, "dim", None)
    if dim is None:
        return code
    if not -x.dim() <= dim < x.dim():
        raise _refusal(
            name, f"splits {what} along dim {dim}, but it has the shape {tuple(x.shape)}",
            hint="Correct the dim in the placements of local_map.",
        )  # fmt: skip
    return S0 + int(dim) % x.dim()


def _stated_collectives(stated: Any, name: str) -> tuple[StatedCollective, ...] | None:
    if stated is None:
        return None
    example = '{"forward": {"all_to_all@ep": 1e9}, "backward": {"all_to_all@ep": 1e9}}'
    if not isinstance(stated, Mapping) or not set(stated) <= {"forward", "backward"}:
        raise _refusal(name, f"states the collectives {stated!r}", hint=f"Write {example}; {{}} means that there are none.")
    found = []
    for phase, items in stated.items():
        for label, size in items.items():
            kind, _, axes = label.partition("@")
            if kind not in _KINDS or not axes or not size > 0:
                raise _refusal(name, f"states the collective {label!r}: {size!r}", hint=f"Write {example}.")
            axes_of = tuple(axes.split("+"))
            found.append(
                StatedCollective(kind=kind, axes=axes_of, whole_bytes=float(size), backward=phase == "backward")
            )  # fmt: skip
    return tuple(found)


def _constant(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _refusal(
        name,
        f"is called with a {type(value).__name__}",
        hint="Hand it tensors one by one, numbers, strings, True, False or None.",
    )


def _refusal(name: str, what: str, hint: str = "") -> TraceError:
    return TraceError(f"the region {name} (a local_map) {what}", hint=hint or "Correct the contract that local_map is given.")
