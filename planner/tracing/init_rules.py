"""How the user's own code initialises each parameter, found by watching it run on the meta device.

Nothing is guessed from names: the operators that fill a storage are followed with their exact numbers, the last full write
wins. What is not a plain fill (a truncated normal, an orthogonal matrix, one row set apart) is `unknown`, not approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from planner import torch_compat
from planner.graph import InitRule

UNKNOWN = InitRule("unknown")
_BASE: Any = torch_compat.dispatch_mode_class()


class InitRecorder(_BASE):
    """While active, remembers per storage the rule that describes its values. Ask with `rule(tensor)` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._rules: dict[int, tuple[InitRule, Any]] = {}  # the storage is kept alive, so that its address stays unique

    def rule(self, tensor: Tensor) -> InitRule:
        found = self._rules.get(_address(tensor))
        return found[0] if found is not None and _is_whole(tensor) else UNKNOWN

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        written = args[0] if args and isinstance(args[0], Tensor) and name.endswith("_") and not name.endswith("__") else None
        if written is not None:
            self._store(written, self._after(name.removesuffix("_"), args, kwargs or {}))
        elif isinstance(result, Tensor) and not _shares_storage(result, args):
            self._store(result, self._after(name, args, kwargs or {}))
        return result

    def _store(self, tensor: Tensor, rule: InitRule) -> None:
        self._rules[_address(tensor)] = (rule if _is_whole(tensor) else UNKNOWN, tensor.untyped_storage())

    def _after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InitRule:
        """The rule of what operator `name` (its in-place twin is spelled the same) writes."""
        if name in _FILLS:
            rule: InitRule = _FILLS[name](*args, **kwargs)
            return rule
        source = self.rule(args[0]) if args and isinstance(args[0], Tensor) else UNKNOWN
        if name in ("clone", "_to_copy", "contiguous", "detach", "lift_fresh"):
            return source
        if name == "copy":
            return self.rule(args[1])
        if name in ("mul", "div", "add", "sub") and len(args) == 2 and isinstance(args[1], int | float) and not kwargs:
            return _affine(source, name, float(args[1]))
        return UNKNOWN


def _normal(like: Any = None, mean: float = 0.0, std: float = 1.0, **_: Any) -> InitRule:
    return InitRule("normal", (float(mean), float(std)))


def _standard_normal(*_: Any, **__: Any) -> InitRule:
    return InitRule("normal", (0.0, 1.0))


def _uniform(like: Any = None, low: float = 0.0, high: float = 1.0, **_: Any) -> InitRule:
    return InitRule("uniform", (float(low), float(high)))


def _standard_uniform(*_: Any, **__: Any) -> InitRule:
    return InitRule("uniform", (0.0, 1.0))


def _constant(value: float) -> Callable[..., InitRule]:
    return lambda *_, **__: InitRule("constant", (value,))


def _filled(like: Any, value: Any, **_: Any) -> InitRule:
    return InitRule("constant", (float(value),)) if isinstance(value, int | float) else UNKNOWN


def _filled_like(like: Any, size: Any, value: Any, **_: Any) -> InitRule:
    return _filled(size, value)


_FILLS: dict[str, Callable[..., InitRule]] = {
    "normal": _normal, "uniform": _uniform, "zero": _constant(0.0), "fill": _filled, "full": _filled, "full_like": _filled,
    "zeros": _constant(0.0), "zeros_like": _constant(0.0), "new_zeros": _constant(0.0),
    "ones": _constant(1.0), "ones_like": _constant(1.0), "new_ones": _constant(1.0), "new_full": _filled_like,
    "randn": _standard_normal, "randn_like": _standard_normal, "rand": _standard_uniform, "rand_like": _standard_uniform,
}  # fmt: skip


def _affine(rule: InitRule, name: str, number: float) -> InitRule:
    """`rule` after multiplication by, division by, or addition or subtraction of a number."""
    if rule.kind == "unknown" or (name == "div" and number == 0):
        return UNKNOWN
    scale = {"mul": number, "div": 1 / number if number else 0.0}.get(name, 1.0)
    shift = {"add": number, "sub": -number}.get(name, 0.0)
    if rule.kind == "normal":
        return InitRule("normal", (rule.values[0] * scale + shift, rule.values[1] * abs(scale)))
    return InitRule(rule.kind, tuple(sorted(value * scale + shift for value in rule.values)))


def _address(tensor: Tensor) -> int:
    return torch_compat.storage_address(tensor)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _shares_storage(result: Tensor, args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and _address(arg) == _address(result) for arg in args)
