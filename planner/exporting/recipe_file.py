"""Writes a plan as a short file in the style of FSDP2: the user's module, `parallelize_module`, `fully_shard`.

Such a file says where tensors lie in the forward pass and leaves the backward pass to DTensor and FSDP: it is approximate, says
so on its top, and is offered only for plans that `expressible` accepts. Pure: the same plan gives the same bytes; no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from planner.errors import ExportError
from planner.exporting.blocks import wrapped
from planner.exporting.expressible import expressible
from planner.exporting.module_recipe import ModuleRecipe, Reason, told
from planner.exporting.script import TORCH_VERSION
from planner.graph import JointGraph, layer_path, without_layer
from planner.plan import Plan
from planner.recipes import Recipe
from planner.units import format_ms

WHOLE = "one"
"""Name of an axis of size 1."""
LABEL = "approximate: DTensor and FSDP choose the backward collectives, not the plan"


@dataclass(frozen=True, kw_only=True)
class FactorySource:
    """How the file gets the user's module: `from module import function`, called with `full`, or `tiny` (None: no small size).

    `folder` is where the module lies; "" for a sample model, which is found on the Python path.
    """

    module: str
    function: str
    full: Mapping[str, Any]
    tiny: Mapping[str, Any] | None
    folder: str = ""


def refusal(plan: Plan, reasons: Sequence[Reason]) -> ExportError:
    """All reasons, the first in the message."""
    lines = told(reasons)
    shown = "".join(f"\n  - {line}" for line in lines[:8])
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    return ExportError(
        f"plan {plan.plan_id} cannot be said as a recipe of modules:{shown}{more}",
        hint=f"Export it as a script (--format script), which runs any plan exactly{_way_to_a_recipe(plan)}.",
        details={"reasons": list(lines)},
    )


def _way_to_a_recipe(plan: Plan) -> str:
    """What to demand of the next plan: a recipe, for all mesh axes of more than one device."""
    recipes = [c for c in plan.constraints if isinstance(c, Recipe)]
    if not recipes:
        return ", or plan with --recipe first"
    spoken = {axis for recipe in recipes for axis in recipe.axes}
    free = [
        name for name, size in zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True) if size > 1 and name not in spoken
    ]
    if not free:
        return ""
    told = f", or plan with recipes for all axes: {' and '.join(free)} {'is' if len(free) == 1 else 'are'} free in this plan"
    whole = f"{recipes[0].name}:{','.join(plan.mesh.axis_names)}"
    return told if len(recipes) > 1 else f"{told} (--recipe {whole})"


def write_recipe(
    plan: Plan, graph: JointGraph, tiny: JointGraph | None, source: FactorySource | None, measured: Sequence[str] = ()
) -> str:
    """The file of a plan. `measured`: lines about what its collectives are beside the plan's, for the head of the file.

    Raises:
        ExportError: the plan is not expressible (with all reasons), or the model cannot be imported from a file.
    """
    found = expressible(plan, graph)
    reasons = found if isinstance(found, list) else []
    if source is None:
        reasons = [
            *reasons,
            Reason(graph.request.model, "the file could not import this model: it is no function of a Python file"),
        ]
    if isinstance(found, list) or source is None:
        raise refusal(plan, reasons)
    text = _File(plan, graph, tiny, source, found, tuple(measured)).text()
    compile(text, "recipe.py", "exec")
    return text


@dataclass(frozen=True)
class _File:
    plan: Plan
    graph: JointGraph
    tiny: JointGraph | None
    source: FactorySource
    recipe: ModuleRecipe
    measured: tuple[str, ...]

    def text(self) -> str:
        template = files("planner.exporting").joinpath("templates", "recipe.py.txt").read_text()
        low = self.graph.request.precision == "bf16-mixed"
        marks = {
            "DOCSTRING": self._docstring(),
            "FNMATCH": "import fnmatch\n" if self.recipe.shard_dims else "",
            "FUNCTOOLS": "import functools\n" if self.recipe.checkpointed else "",
            "IMPORTS": "\n".join(self._imports()),
            "FACTORY": self._factory(),
            "LABEL": LABEL,
            "PLAN_ID": _quoted(self.plan.plan_id),
            "TORCH": _quoted(TORCH_VERSION),
            "MESH": _literal(self._mesh()),
            "DATA": _literal(tuple(name for name in (self._name(self.recipe.replicate), self._name(self.recipe.shard)) if name)),
            "LOW_PRECISION": "torch.bfloat16" if low else "None  # as the model was written",
            "FULL": _literal(dict(self.source.full)),
            "TINY": _literal(None if self.source.tiny is None else dict(self.source.tiny)),
            "INPUTS": "\n".join(self._inputs()),
            "PLANNED": _literal(self.plan.collective_counts),
            "PARALLELIZE": self._parallelize(),
            "SETTLE_LOSS": self._settle_loss(),
        }
        return re.sub(r"@@([A-Z_]+)@@", lambda match: marks[match[1]], template)

    # ---- head ---------------------------------------------------------------------------------------------------------
    def _docstring(self) -> str:
        plan, request = self.plan, self.graph.request
        lines = [
            f"RECIPE, {LABEL}.",
            "",
            f"plan       {plan.plan_id} of {_plain(request.model)} on {plan.mesh} ({_plain(plan.hardware_name)}), predicted "
            f"{format_ms(plan.objective_us)} per step",
            *(f"differs    {note}" for note in self.recipe.notes),
            *self._measured(),
            "verify     python recipe.py --check       loss and every gradient against the plain module, threads as ranks, fp32",
            "           python recipe.py --dry-run     collectives of the recipe beside those of the plan",
            f"train      torchrun --nproc_per_node={self._ranks()} recipe.py --steps 10",
            "Each rank builds the whole module in host memory before its parameters are split.",
            "The script of the same plan (export --format script) runs it exactly.",
        ]
        return '"""' + "\n".join(lines) + '\n"""'

    def _measured(self) -> list[str]:
        lines = [part for line in self.measured for part in _cut(line)]
        if lines and (self.recipe.shard or self.recipe.replicate):
            lines.append("fully_shard sends one message for all parameters of a block, the plan one for each")
        return [f"{'measured' if not number else '':<11}{line}" for number, line in enumerate(lines)]

    def _ranks(self) -> int:
        return self.plan.mesh.num_devices

    def _factory(self) -> str:
        path = [f"sys.path.insert(0, {_quoted(self.source.folder)})  # where the model lies"] if self.source.folder else []
        return "\n".join([*path, f"from {self.source.module} import {self.source.function} as factory"])

    def _imports(self) -> list[str]:
        recipe = self.recipe
        styles = ["parallelize_module"] if recipe.tensor else []
        if recipe.tensor:
            styles += ["ColwiseParallel"] if recipe.column or any(how == "columns" for _, how in recipe.embeddings) else []
            styles += ["RowwiseParallel"] if recipe.row or any(how == "rows" for _, how in recipe.embeddings) else []
            styles += ["SequenceParallel"] if recipe.norms else []
            styles += [] if not recipe.sources else ["ParallelStyle"] if recipe.sequence_dim is None else ["PrepareModuleOutput"]
        tensor = [
            "DTensor",
            *(["Replicate", "distribute_module"] if recipe.tensor else []),
            *(["Shard"] if self._needs_shard() else []),
        ]
        lines = ["from torch.distributed.device_mesh import DeviceMesh, init_device_mesh"]
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
        lines.append(f"from torch.distributed.tensor import {', '.join(sorted(tensor))}")
        if styles:
            lines.append(f"from torch.distributed.tensor.parallel import {', '.join(sorted(styles, key=str.lower))}")
        if recipe.checkpointed:
            lines.append("from torch.utils.checkpoint import checkpoint")
        functional = ["import torch.nn.functional as F"] if recipe.tensor else []
        return [*functional, *sorted(lines)]

    def _needs_shard(self) -> bool:
        return bool(self.recipe.shard_dims) or (bool(self.recipe.tensor) and self.recipe.sequence_dim is not None)

    def _name(self, axes: tuple[int, ...]) -> str:
        return "+".join(self.plan.mesh.axis_names[axis] for axis in axes)

    def _mesh(self) -> dict[str, int]:
        """Axes of one use are one axis of the recipe. If no axis splits parameters, one of size 1 stands for it: `fully_shard`
        over it keeps them whole, sums gradients over the replicas, and does the casts."""
        sizes = self.plan.mesh.axis_sizes
        group_of = {axis: group for group in (self.recipe.replicate, self.recipe.shard, self.recipe.tensor) for axis in group}
        found: dict[str, int] = {}
        for axis, size in enumerate(sizes):
            if size > 1:
                name = self._name(group_of.get(axis, (axis,)))
                found[name] = found.get(name, 1) * size
        return found if self.recipe.shard else found | {WHOLE: 1}

    def _inputs(self) -> list[str]:
        small = {item.name: item.high for item in (self.tiny or self.graph).inputs}
        return [
            f"    {_quoted(item.name)}: ({item.batch_dim is not None}, {item.high}, {small.get(item.name)}),"
            for item in self.graph.inputs
        ]

    # ---- the recipe itself --------------------------------------------------------------------------------------------
    def _parallelize(self) -> str:
        lines = [*self._helpers(), "def parallelize(model, mesh, low_precision):"]
        if self.recipe.tensor:
            lines += self._tensor_lines()
        if self.recipe.checkpointed:
            lines += _indented(f"for name in {_literal(self.recipe.checkpointed)}:  # forward runs again in backward")
            lines.append("        block = model.get_submodule(name)")
            lines.append("        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)")
        lines += self._data_lines()
        return "\n".join(lines)

    def _helpers(self) -> list[str]:
        lines: list[str] = []
        if self.recipe.tensor:
            lines += _ATTENTION.splitlines() + ["", ""]
            lines += _PLAIN_TENSORS.splitlines() + ["", ""]
        if self.recipe.tensor and self.recipe.sources and self.recipe.sequence_dim is None:
            lines += _SUM_GRADIENTS.splitlines() + ["", ""]
        return lines

    def _tensor_lines(self) -> list[str]:
        recipe = self.recipe
        between = "Replicate()" if recipe.sequence_dim is None else f"Shard({recipe.sequence_dim})"
        styles: dict[str, str] = {}
        for module, how in recipe.embeddings:
            kind = "RowwiseParallel" if how == "rows" else "ColwiseParallel"
            styles[module] = f"{kind}(input_layouts=Replicate(), output_layouts={between}, use_local_output=False)"
        for module in recipe.column:
            inside = layer_path(module.replace("*", "0")) is not None
            styles[module] = f"ColwiseParallel({'use_local_output=False' if inside else 'output_layouts=Replicate()'})"
        for module in recipe.row:
            styles[module] = f"RowwiseParallel(output_layouts={between}, use_local_output=False)"
        for module in recipe.norms:
            at = "" if recipe.sequence_dim == 1 else f"sequence_dim={recipe.sequence_dim}"
            styles[module] = f"SequenceParallel({at})"
        lines = ["    plain_tensors_are_whole()", f"    tensor = mesh[{_quoted(self._name(recipe.tensor))}]", "    styles = {"]
        lines += [f"        {_quoted(module)}: {style}," for module, style in styles.items()]
        lines += ["    }", "    parallelize_module(model, tensor, styles, src_data_rank=None)"]
        if recipe.sources:
            style = "SumGradients()"
            if recipe.sequence_dim is not None:  # one gather for all products that read it
                layouts = f"output_layouts={between}, desired_output_layouts=Replicate()"
                style = f"PrepareModuleOutput({layouts}, use_local_output=False)"
            lines.append(f"    source = {style}")
            lines += _indented(f"parallelize_module(model, tensor, dict.fromkeys({_literal(recipe.sources)}, source))")
        lines.append("    distribute_module(model, tensor)  # all other parameters: whole on each rank")
        for parameter in self.graph.parameters:
            for alias in parameter.names[1:]:
                owner, _, last = alias.rpartition(".")
                first, _, attribute = parameter.name.rpartition(".")
                lines.append(
                    f"    model.get_submodule({_quoted(owner)}).{last} = model.get_submodule({_quoted(first)}).{attribute}"
                )
        return lines

    def _data_lines(self) -> list[str]:
        recipe = self.recipe
        lines = ["    precision = MixedPrecisionPolicy(param_dtype=low_precision, reduce_dtype=low_precision and torch.float32)"]
        names = [_quoted(name) for name in (self._name(recipe.replicate), self._name(recipe.shard) or WHOLE) if name]
        options = [f"mesh=mesh[{', '.join(names)}]", "mp_policy=precision"]
        options += [f"reshard_after_forward={recipe.reshard}"] if recipe.shard else []
        lines.append(f"    options = dict({', '.join(options)})")
        if recipe.shard_dims:
            lines.append("    # parameters are split on dim 0 over the data axes, these on another dim")
            lines += _indented(f"dims = {_literal(self._dims())}")
            lines.append("    split = {")
            lines.append("        p: next((dim for pattern, dim in dims.items() if fnmatch.fnmatch(name, pattern)), 0)")
            lines.append("        for name, p in model.named_parameters()")
            lines.append("    }")
            lines.append('    options["shard_placement_fn"] = lambda p: Shard(split[p])')
        for container in dict.fromkeys(path.rpartition(".")[0] for path in recipe.blocks):
            lines.append(f"    for block in model.get_submodule({_quoted(container)}).children():")
            lines.append("        fully_shard(block, **options)")
        lines.append("    return fully_shard(model, **options)")
        return lines

    def _dims(self) -> dict[str, int]:
        return {without_layer(name): dim for name, dim in self.recipe.shard_dims}

    def _settle_loss(self) -> str:
        if not self.recipe.tensor:
            return ""
        whole = "    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss"
        return whole + "\n    loss.register_hook(plain_tensors_are_whole)"


_ATTENTION = '''\
def attention(q, k, v, *args, **kwargs):
    """Heads are split: each rank computes attention of its own ones, on local tensors."""
    if not isinstance(q, DTensor):
        return plain_attention(q, k, v, *args, **kwargs)
    k, v = (t.redistribute(placements=q.placements) for t in (k, v))
    out = plain_attention(q.to_local(), k.to_local(), v.to_local(), *args, **kwargs)
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


plain_attention = F.scaled_dot_product_attention
F.scaled_dot_product_attention = attention'''

_PLAIN_TENSORS = '''\
def plain_tensors_are_whole(gradient=None):
    """Positions and masks that the model makes are equal on all ranks. Said once per thread: backward on a GPU has its own."""
    DTensor._op_dispatcher._allow_implicit_replication = True'''

_SUM_GRADIENTS = '''\
class SumGradients(ParallelStyle):
    """In backward, the pending gradients of the products that read this module's result are summed here."""

    def _apply(self, module, device_mesh):
        module.register_forward_hook(lambda module, inputs, out: out.redistribute(placements=out.placements))
        return module'''


def _quoted(text: str) -> str:
    return '"' + repr(text)[1:-1].replace('"', '\\"') + '"'


def _literal(value: Any) -> str:
    """A Python literal on one line, in double quotes; wrapped by a line per entry where it is long."""
    one = repr(value).replace("'", '"')
    if len(one) <= 100 or not isinstance(value, Mapping | tuple):
        return one
    entries = [f"{_literal(k)}: {_literal(v)}" for k, v in value.items()] if isinstance(value, Mapping) else map(_literal, value)
    opened, closed = "{}" if isinstance(value, Mapping) else "()"
    return "\n".join([opened, *("    " + line for entry in entries for line in f"{entry},".splitlines()), closed])


def _cut(line: str) -> list[str]:
    """A line of items after a title, as lines that fit the head of the file."""
    title, _, rest = line.partition(": ")
    lines = wrapped(rest.split(", "), " " * (len(title) + 2), _WIDTH)
    lines[-1] = lines[-1].rstrip(",")
    return [f"{title}: {lines[0].strip()}", *lines[1:]]


_WIDTH = 116
"""Of a line in the head of the file, without its first column."""


def _indented(text: str) -> list[str]:
    return ["    " + line for line in text.splitlines()]


def _plain(text: str) -> str:
    """Text of the user inside the docstring: printable, without quotes or backslashes."""
    return "".join(c if c.isalnum() or c in " .,:=/()+-_[]*>" else "?" for c in text)
