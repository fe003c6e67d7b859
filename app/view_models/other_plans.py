"""Names of the plans that can be compared, as the user reads them."""

from __future__ import annotations

from planner import RECIPES

TITLES = {
    "ddp": "data parallel", "fsdp": "fully sharded", "hsdp": "sharded in groups", "tp": "tensor parallel",
    "tp_sp": "tensor and sequence parallel", "fsdp_tp_sp": "fully sharded, tensor and sequence parallel", "ep": "expert parallel",
}  # fmt: skip


def recipe_label(name: str) -> str:
    return f"recipe {name}: {TITLES.get(name, name)}"


def recipe_labels() -> dict[str, str]:
    """Label -> name of the recipe."""
    return {recipe_label(name): name for name in RECIPES}


def what_if_labels(plan_id: str, hardware: str) -> tuple[str, str]:
    """(the same decisions, the best ones) on other hardware."""
    return f"plan {plan_id[:7]} as it is on {hardware}", f"solved anew on {hardware} (from plan {plan_id[:7]})"


def usual_baseline(num_axes: int) -> str:
    """What experts would write by hand on so many mesh axes."""
    return recipe_label("fsdp_tp_sp" if num_axes > 1 else "fsdp")
