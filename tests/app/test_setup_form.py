"""The cluster on the Setup page: network, devices per node, what the page says about the links, and the form of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.view_models import setup_form
from app.view_models.setup_form import SetupForm
from planner import Mesh
from tests.app.synthetic import make_plan, small_graph


def request(**fields: str):
    found = setup_form.read(SetupForm(**fields)).request
    assert found is not None
    return found


def test_network_and_devices_per_node_are_asked_for() -> None:
    asked = request(network="roce_8x400g", gpus_per_node="4")
    assert (asked.hardware, asked.gpus_per_node) == ("h100_sxm+roce_8x400g", 4)
    usual = request()
    assert (usual.hardware, usual.gpus_per_node) == ("h100_sxm", 8)


@pytest.mark.parametrize("text", ["0", "eight", "-1", "4.5"])
def test_a_wrong_number_of_devices_per_node_is_said_at_its_field(text: str) -> None:
    result = setup_form.read(SetupForm(gpus_per_node=text))
    assert result.request is None and "the hardware" in result.errors["gpus_per_node"]


@pytest.mark.parametrize(
    ("mesh", "per_node", "inside", "across"),
    [
        ("dp=8,tp=8", "", "tp inside a node of 8", "dp across nodes"),
        ("dp=8,tp=8", "4", "", "dp, tp across nodes"),
        ("tp=8", "", "tp inside a node of 8", ""),
        ("pp=2,dp=2,tp=4", "", "dp, tp inside a node of 8", "pp across nodes"),
    ],
)
def test_the_page_says_which_axes_cross_nodes(mesh: str, per_node: str, inside: str, across: str) -> None:
    text = setup_form.links_text(request(mesh=mesh, gpus_per_node=per_node))
    assert inside in text and across in text and "GB/s" in text and "NVIDIA H100" in text
    assert ("inside" in text) is bool(inside) and ("across" in text) is bool(across)


def test_the_form_of_a_plan_asks_for_that_plan_again() -> None:
    plan = replace(make_plan(small_graph(), Mesh.parse("dp=2,tp=4")), hardware_name="h100_sxm+roce_8x400g", gpus_per_node=4)
    form = setup_form.form_of(plan, None, (plan.request.model,))
    assert (form.hardware, form.network, form.gpus_per_node) == ("h100_sxm", "roce_8x400g", "4")
    again = setup_form.read(form).request
    assert again is not None
    assert (again.hardware, again.gpus_per_node, again.mesh) == (plan.hardware_name, plan.gpus_per_node, plan.mesh)
