"""Workbenches of sample models, traced once per run of the tests."""

from __future__ import annotations

from functools import cache

from planner import Workbench, pipeline
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.plan import Plan
from planner.recipes import Recipe

ROOMY = 2**50
"""A memory budget that never binds, bytes."""


@cache
def traced(model: str, batch: int, layers: int | None = None) -> JointGraph:
    return pipeline.trace(ModelRequest(model=model, batch=batch, layers=layers))


@cache
def bench(model: str, mesh: str, batch: int = 16, layers: int | None = None) -> Workbench:
    return Workbench.build(traced(model, batch, layers), Mesh.parse(mesh))


def planned(found: Workbench, *recipes: str) -> Plan:
    asked = [Recipe.parse(recipe, found.mesh) for recipe in recipes]
    return found.solve([*found.default_constraints(ROOMY), *asked], exact=False)
