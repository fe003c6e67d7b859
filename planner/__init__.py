"""The engine: load a training model, choose a placement for every tensor, export a script that runs the plan.

Importing this package loads neither torch nor numpy-heavy stages; each name is loaded on first use.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Mesh": "mesh",
    "JointGraph": "graph",
    "ModelRequest": "graph",
    "TensorRef": "graph",
    "VIEW_OPS": "graph",
    "layer_of": "graph",
    "without_layer": "graph",
    "Plan": "plan",
    "Pin": "constraint",
    "Allow": "constraint",
    "Forbid": "constraint",
    "ForbidCollective": "constraint",
    "SamePlacement": "constraint",
    "ReshardAfterForward": "constraint",
    "Recipe": "recipes",
    "RECIPES": "recipes",
    "parse_forbid": "constraint",
    "parse_recipe": "constraint",
    "BoundaryPlacement": "constraint",
    "MemoryBudget": "constraint",
    "resolve": "address",
    "parse_bytes": "units",
    "PlannerError": "errors",
    "InputError": "errors",
    "InvalidConstraintError": "errors",
    "InfeasibleError": "errors",
    "PlanFormatError": "errors",
    "Override": "reasons",
    "Explanation": "reasons",
    "Relaxation": "reasons",
    "PlanRequest": "pipeline",
    "Workbench": "workbench",
    "models": "pipeline",
    "make_plan": "pipeline",
    "hardware_names": "pipeline",
    "hardware_profile": "pipeline",
    "check_batch": "pipeline",
    "check_same_model": "matching",
    "planned_graph": "matching",
    "trace": "pipeline",
    "diff": "pipeline",
    "export": "pipeline",
    "export_recipe": "pipeline",
    "not_expressible": "pipeline",
    "report_lines": "exporting.report",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(f"planner.{_HOME[name]}"), name)
