"""Every error a user can meet: what happened, to which thing, what to try. `assert` is for our own mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PlannerError(Exception):
    """Base of all errors shown to users. `message` says what happened to which thing, `hint` what to try."""

    def __init__(self, message: str, *, hint: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process borders (worker -> app); keyword-only fields need saying."""
        return _rebuild, (type(self), self.__dict__)

    def explain(self) -> str:
        """The text for a terminal: message, then hint."""
        return self.message if not self.hint else f"{self.message}\n  hint: {self.hint}"


def _rebuild(kind: type[PlannerError], state: dict[str, Any]) -> PlannerError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class InputError(PlannerError):
    """Something the user typed or a file the user gave cannot be used."""


class InvalidMeshError(InputError):
    pass


class UnknownHardwareError(InputError):
    pass


class UnknownModelError(InputError):
    pass


class InvalidConstraintError(InputError):
    """A pin, boundary or budget that is malformed, matches nothing or has no legal strategy."""


class PlanFormatError(InputError):
    """A plan file that is not one, is of another version, or belongs to another model."""


class TraceError(PlannerError):
    pass


class UnsupportedOpError(TraceError):
    def __init__(self, message: str, *, op: str, module: str, source: str, hint: str = "") -> None:
        super().__init__(message, hint=hint, details={"op": op, "module": module, "source": source})


class InfeasibleError(PlannerError):
    """No plan satisfies all constraints.

    Attributes:
        conflicts: the smallest set found of user constraints that cannot hold together, each in the user's words.
        shortfall_bytes: how many bytes the budget is short of the smallest plan found, if memory is the reason.
    """

    def __init__(
        self, message: str, *, hint: str = "", conflicts: Sequence[str] = (), shortfall_bytes: int | None = None
    ) -> None:
        super().__init__(message, hint=hint, details={"conflicts": list(conflicts), "shortfall_bytes": shortfall_bytes})
        self.conflicts = tuple(conflicts)
        self.shortfall_bytes = shortfall_bytes


class SolverError(PlannerError):
    pass


class ExportError(PlannerError):
    pass
