"""Does a plan belong to a graph? The graph of a plan: the model's, with the layers repeated that the plan checkpoints."""

from __future__ import annotations

from planner.checkpointing import checkpointed, layer_names
from planner.errors import PlanFormatError
from planner.graph import JointGraph
from planner.plan import Plan


def planned_graph(plan: Plan, graph: JointGraph) -> JointGraph:
    """The graph of a plan: the model's, with the layers repeated that the plan checkpoints.

    Raises:
        PlanFormatError: the model does not have those layers.
    """
    if plan.checkpointed == graph.checkpointed:
        return graph
    unknown = sorted(set(plan.checkpointed) - set(layer_names(graph)))
    if unknown:
        raise PlanFormatError(
            f"the plan was made for another model than {graph.request.model}: it checkpoints {unknown[0]}, which is not in it",
            hint="Plan again for this model; pins are named by module and can be given again.",
        )
    return checkpointed(graph, plan.checkpointed)


def check_same_structure(plan: Plan, graph: JointGraph) -> None:
    """Raises PlanFormatError naming the first difference if the plan's ops are not those of the graph."""
    graph = planned_graph(plan, graph)
    if plan.structure_fingerprint == graph.structure_fingerprint:
        return
    missing = [key for key in plan.choices if key not in graph.node_by_key]
    added = [node.key for node in graph.nodes if node.key not in plan.choices]
    first = "the same ops are wired differently"
    if missing:
        first = f"it places {missing[0]}, which the model does not have"
    elif added:
        first = f"it does not place {added[0]}"
    raise PlanFormatError(
        f"the plan was made for another model than {graph.request.model}: {first}",
        hint="Plan again for this model; pins are named by module and can be given again.",
    )


def check_same_model(plan: Plan, graph: JointGraph) -> None:
    """As check_same_structure, and shapes, dtypes and arguments must agree too."""
    check_same_structure(plan, graph)
    if plan.fingerprint != planned_graph(plan, graph).fingerprint:
        raise PlanFormatError(
            f"the plan was made for {graph.request.model} at other sizes: shapes, dtypes or arguments differ",
            hint="Use the batch, sequence length and precision of the plan (see `show`), or replay it: plan --from plan.json.",
        )
