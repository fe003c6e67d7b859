"""Writes a plan as one PyTorch training file. Pure: the same plan and graphs give the same bytes; nothing of torch is imported.

The file consists of the templates beside this module, in order: head (constants, layouts, tables, redistribution), helpers of
ops that need one, block functions, step, tail (model, data, training, verification). Marks `@@NAME@@` are filled in here; values
enter through `repr` or as checked names.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from planner.errors import ExportError
from planner.exporting.blocks import BlockWriter, Function, Layouts, TinyNodes, call_lines, layout_lines, quoted, wrapped
from planner.exporting.buffers import BufferFunctions, require_known
from planner.exporting.driver import Driver
from planner.exporting.lower import lower
from planner.exporting.ops import dtype_text
from planner.exporting.parts import said
from planner.exporting.program import Program
from planner.exporting.regions import import_lines, operator_lines, regions_of
from planner.exporting.symbols import Sizes, axis_variables
from planner.graph import BACKWARD, FORWARD, Buffer, JointGraph, Parameter, TensorRef, layer_of, without_layer
from planner.placement import Placements, Shard, identifier
from planner.plan import Plan
from planner.schedule import BlockKey, Part
from planner.units import GIB, format_ms

TORCH_VERSION = "2.13."
"""Exported files refuse other minor versions: they use operators whose signatures torch may change."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is forecast of the step as the file runs it: its time, update included, and the memory of a device."""

    step_us: float
    allocated_bytes: int
    reserved_bytes: int


def write_script(
    plan: Plan, graph: JointGraph, tiny: JointGraph | None, *, embed_plan: bool = False, outlook: Outlook | None = None
) -> str:
    """The training file of a plan.

    Args:
        graph: the graph that the plan was made for.
        tiny: the same model traced at small sizes, with the same depth; None if it has no small version: then sizes are
            literal, and the file checks itself at full size.
        embed_plan: store the whole plan in the file, compressed, for its --print-plan.
        outlook: told in the file and beside what it measures; without it, the objective is.

    Raises:
        ExportError: the plan does not fit the graph, or an op cannot be written with the chosen layouts.
    """
    require_known(graph)
    program = lower(plan, graph)
    sizes = _sizes(plan, graph, tiny)
    layouts = Layouts(taken=frozenset([*sizes.full, *sizes.axis_names]))
    writer = BlockWriter(program, TinyNodes(graph, tiny), sizes, layouts)
    functions = {(block.key, part): f for block in program.blocks for part, f in writer.functions(block).items()}
    names = _function_names(program, functions)
    text = _Script(program, tiny, sizes, layouts, writer.tiny, functions, names, embed_plan, outlook).text()
    compile(text, "train.py", "exec")
    return text


def _sizes(plan: Plan, graph: JointGraph, tiny: JointGraph | None) -> Sizes:
    full = dict(graph.symbols)
    axis_names = axis_variables(plan.mesh, list(full))
    if tiny is None:
        return Sizes(full=full, tiny=None, axis_names=axis_names)
    small = dict(tiny.symbols)
    if list(small) != list(full):
        raise ExportError(
            f"the tiny version names other sizes ({', '.join(small)}) than the model ({', '.join(full)})",
            hint="plan_sizes() must give the same names at every size.",
        )
    for name in full:
        if not name.isidentifier() or name in _GLOBAL_NAMES:
            raise ExportError(f"the size name {name!r} cannot be a name in the file", hint="Rename it in plan_sizes().")
    return Sizes(full=full, tiny=small, axis_names=axis_names)


_GLOBAL_NAMES = frozenset({
    "FULL", "TINY", "PLAN_ID", "TORCH_MADE_FOR", "MESH_NAMES", "PLANNED_MESH", "MESH_SHAPE", "AXES", "DEVICE", "LOWP",
    "OPTIMIZER", "OPTIONS", "END", "GROUPS", "PARAMS", "INPUTS", "TRAINED", "TIED", "PLANNED", "PLANNED_COLLECTIVES",
    "PLANNED_ORDER", "BLOCKS",
    "STEP_FLOPS", "BUFFERS", "WRITTEN", "PREDICTED_MS", "PREDICTED_GIB", "PLAN", "TOKENS",
})  # fmt: skip


def _function_names(program: Program, functions: Functions) -> dict[tuple[BlockKey, Part], str]:
    """Functions with equal text get one name; a second version of the same part gets a number."""
    names: dict[tuple[BlockKey, Part], str] = {}
    known: dict[tuple[str, Function], str] = {}
    versions: Counter[str] = Counter()
    for (key, part), function in functions.items():
        place = "before" if key.number < 0 else "block" if key.number < program.num_layers else "after"
        phase = "fwd" if key.phase == FORWARD else "bwd"
        base = f"{place}_{_PART_NAMES[part].format(phase)}"
        if (base, function) not in known:
            versions[base] += 1
            known[base, function] = base if versions[base] == 1 else f"{base}_v{versions[base]}"
        names[key, part] = known[base, function]
    return names


_PART_NAMES = {Part.COMPUTE: "{}", Part.UNSHARD: "unshard_{}", Part.REDUCE: "reduce", Part.COLLECT: "collect"}
Functions = dict[tuple[BlockKey, Part], Function]


@dataclass(frozen=True)
class _Script:
    program: Program
    tiny: JointGraph | None
    sizes: Sizes
    layouts: Layouts
    tiny_nodes: TinyNodes
    functions: Functions
    names: dict[tuple[BlockKey, Part], str]
    embed_plan: bool
    outlook: Outlook | None

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def graph(self) -> JointGraph:
        return self.program.graph

    def text(self) -> str:
        noise = {key: function.keys for (key, part), function in self.functions.items() if part is Part.COMPUTE}
        driver = Driver(self.program, self.names, noise)
        blocks = self._block_functions()
        step = _fill(
            template("step"),
            {
                "FORWARD": "\n".join([*driver.lines(FORWARD), *driver.update_lines()]),
                "BACKWARD": "\n".join(driver.lines(BACKWARD)),
                "LOSS": driver.loss(),
            },
        )
        tables = self._tables()  # after the blocks: these name the layouts and sizes that blocks use
        marks = {**tables, **self._constants()}
        marks["LAYOUTS"] = "\n".join(layout_lines(self.layouts))
        head = _fill(template("head"), marks)
        buffers = _fill(template("buffers"), marks)
        used = list(dict.fromkeys(name for (_, part), name in self.names.items() if part is Part.COMPUTE))
        listed = "\n".join(["# compiled one by one with --compile", *call_lines("BLOCKS = ", [f'"{name}"' for name in used])])
        listed = listed.replace('")', '",)') if len(used) == 1 else listed
        fixed = (template(name) for name in ("model", "data", "start", "train", "verify"))
        parts = [
            head,
            operator_lines(self.graph),
            import_lines(self.graph),
            _helpers(blocks + buffers),
            buffers,
            _BLOCKS_TITLE + blocks,
            listed,
            step,
            *fixed,
        ]
        return "\n\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"

    def _block_functions(self) -> str:
        written: dict[str, str] = {}
        for key, function in self.functions.items():
            written.setdefault(self.names[key], function.write(self.names[key]))
        return "\n\n\n".join(written.values())

    # ---- constants --------------------------------------------------------------------------------------------------
    def _constants(self) -> dict[str, str]:
        plan, sizes = self.plan, self.sizes
        full, tiny = sizes.values() if sizes.tiny is not None else ({}, {})
        flops = [graph.model_flops for graph in (self.graph, self.tiny or self.graph)]
        return {
            "DOCSTRING": self._docstring(),
            "PLAN_ID": quoted(repr(plan.plan_id)),
            "TORCH": quoted(repr(TORCH_VERSION)),
            "MESH_NAMES": quoted(repr(plan.mesh.axis_names)),
            "MESH_SHAPE": repr(plan.mesh.axis_sizes),
            "FULL": _dict_text(full),
            "TINY": _dict_text(tiny),
            "FLOPS": f"({flops[0]:.6e}, {flops[1]:.6e})",
            **self._predicted(),
            "PLAN": self._embedded_plan(),
            "SIZES": f"{_targets(full)} = FULL.values()" if full else "# sizes are literal numbers: one size is known",
            "AXES": quoted(repr(sizes.axis_names)),
            "AXIS_SIZES": f"{_targets(sizes.axis_names)} = PLANNED_MESH",
            "OPTIMIZER": quoted(repr(plan.memory_policy.optimizer)),
            "GROUPS": repr(self._groups()),
            "PLANNED": self._planned_redistributions(),
            "PLANNED_COLLECTIVES": _nested_dict_text(plan.collective_counts),
            "PLANNED_ORDER": quoted(repr({phase: self._order(phase) for phase in (FORWARD, BACKWARD)})),
        }

    def _predicted(self) -> dict[str, str]:
        told = self.outlook
        if told is None:
            numbers = self.plan.objective_us, self.plan.memory.peak_bytes
            what = "the step without overlap; memory without temporaries"
        else:
            numbers, what = (told.step_us, told.allocated_bytes), "the step, update included; the most that is allocated"
        return {"PREDICTED": f"{numbers[0] / 1e3:.3f}, {numbers[1] / GIB:.3f}", "PREDICTED_WHAT": what}

    def _embedded_plan(self) -> str:
        """The plan as a literal of many lines: deflated, in base 85, whose alphabet has no quotes and no backslash."""
        if not self.embed_plan:
            return '""'
        text = base64.b85encode(zlib.compress(self.plan.dumps().encode(), 9)).decode()
        return "\n".join(["(", *(f'    "{text[at : at + 120]}"' for at in range(0, len(text), 120)), ")"])

    def _docstring(self) -> str:
        plan, graph = self.plan, self.graph
        memory = {name.removesuffix("_bytes"): value / GIB for name, value in plan.memory.to_json().items()}
        kept = memory.pop("kept_parameter")
        request = graph.request
        asked = ", ".join(
            f"{name} {value}".strip()
            for name, value in (
                ("batch", request.batch),
                ("seq", request.seq),
                ("layers", request.layers),
                ("", request.precision),
            )
            if value is not None
        )
        shapes = ", ".join(f"{item.name} {list(graph.meta(TensorRef(item.node, 0)).shape)}" for item in graph.inputs)
        lines = [
            f"Training step of plan {plan.plan_id}. Needs PyTorch {TORCH_VERSION}x and {self._needs()}.",
            "",
            f"model      {_plain(request.model)} ({asked}); {_plain(graph.class_name) or 'class not recorded'}",
            *([_STAND_IN_LOSS] if graph.stand_in_loss else []),
            f"inputs     {shapes}",
            f"mesh       {plan.mesh}, {plan.mesh.num_devices} devices ({_plain(plan.hardware_name)})",
            *([f"repeated   {plan.checkpointed_text}"] if plan.checkpointed else []),
            *([f"kept       {plan.kept_text}: {kept:.3f} GiB per device"] if plan.kept_text else []),
            f"predicted  {format_ms(plan.objective_us)} per step (serial, no overlap): compute {format_ms(plan.compute_us)}, "
            f"communication {format_ms(plan.comm_us)}",
            "           "
            + ", ".join(f"{name} {gib:.3f} GiB" for name, gib in memory.items())
            + f", together {plan.memory.peak_bytes / GIB:.3f} GiB per device",
            *self._outlook_lines(),
        ]
        for phase, counts in plan.collective_counts.items():
            counted = [f"{count} {label}" for label, count in counts.items()] or ["no collectives"]
            lines += _paragraph(f"{phase:<11}", counted)
        return '"""' + "\n".join([*lines, "", *_commands(plan, has_tiny=self.tiny is not None)]) + '\n"""'

    def _outlook_lines(self) -> list[str]:
        told = self.outlook
        if told is None:
            return []
        allocated, reserved = (f"{size / GIB:.3f} GiB" for size in (told.allocated_bytes, told.reserved_bytes))
        return [
            f"forecast   {format_ms(told.step_us)} per step as this file runs it: communication beside compute, launches, update",
            f"           {allocated} allocated at the most, {reserved} of the device taken, if blocks are compiled",
        ]

    def _needs(self) -> str:
        """Modules of the user's that hold a region or register an operator."""
        held = [*(region.module for region in regions_of(self.graph).values()), *(module for _, module in self.graph.operators)]
        modules = dict.fromkeys(map(_plain, held))
        return f"{', '.join(modules)}, whose functions it runs" if modules else "nothing else"

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        axes = {step.collective.axes for r in self.plan.redistributions for step in r.steps if step.collective is not None}
        return tuple(sorted(axes, key=lambda group: (len(group), group)))

    def _planned_redistributions(self) -> str:
        counts: dict[str, Counter[str]] = {FORWARD: Counter(), BACKWARD: Counter()}
        for r in self.plan.redistributions:
            counts[r.phase][" -> ".join(identifier(p) for p in (r.source, *(step.target for step in r.steps)))] += 1
        return _nested_dict_text({phase: dict(sorted(found.items())) for phase, found in counts.items()})

    def _order(self, phase: str) -> str:
        """What the step's `local.order` comes to (see the template that verifies)."""
        return hashlib.sha256("".join(f"{line}\n" for line in said(self.program, phase)).encode()).hexdigest()[:16]

    # ---- tables -----------------------------------------------------------------------------------------------------
    def _tables(self) -> dict[str, str]:
        trained = [p.name for p in self.graph.parameters if p.gradient is not None]
        all_trained = len(trained) == len(self.graph.parameters)
        tied = {alias: p.name for p in self.graph.parameters for alias in p.names[1:]}
        return {
            "PARAMS": "\n".join(_table((p.name, self._parameter_entry(p)) for p in self.graph.parameters)),
            **self._buffer_tables(),
            "TRAINED": "list(parameters())" if all_trained else repr(trained),
            "TIED": repr(tied),
            "INPUTS": "\n".join(self._input_lines()),
            "DIVISIBLE": "\n".join(self._divisible_lines()),
        }

    def _buffer_tables(self) -> dict[str, str]:
        functions = BufferFunctions(self.sizes)
        entries = [(buffer.name, self._buffer_entry(buffer, functions)) for buffer in self.graph.buffers]
        return {
            "FUNCTIONS": f"\n\n{functions.text()}\n\n" if entries else "",
            "BUFFERS": "\n".join(_table(entries)),
            "WRITTEN": _list_text([buffer.name for buffer in self.graph.buffers if buffer.update is not None]),
        }

    def _buffer_entry(self, buffer: Buffer, functions: BufferFunctions) -> str:
        full, tiny = self.graph.meta(TensorRef(buffer.node, 0)), self.tiny_nodes.meta(TensorRef(buffer.node, 0))
        small = self._tiny_buffer(buffer)
        assert buffer.first_value is not None and small.first_value is not None, buffer.name
        function = functions.name(buffer, buffer.first_value, small.first_value)
        layout = self.layouts.name(self._stored(buffer.node))
        return (
            f"({self.sizes.shape(full.shape, tiny.shape)}, {layout}, {dtype_text(full.dtype)}, {function}, {buffer.persistent})"
        )

    def _tiny_buffer(self, buffer: Buffer) -> Buffer:
        if self.tiny is None:
            return buffer
        return self.tiny.buffer_of_node[self.tiny.node_by_key[self.tiny_nodes.node(buffer.node).key]]

    def _parameter_entry(self, parameter: Parameter) -> str:
        ref = TensorRef(parameter.node, 0)
        full, tiny = self.graph.meta(ref), self.tiny_nodes.meta(ref)
        stored = self._stored(parameter.node)
        rule = (parameter.init.kind, *parameter.init.values)
        dtype = dtype_text(full.dtype)
        return f"({self.sizes.shape(full.shape, tiny.shape)}, {self.layouts.name(stored)}, {dtype}, {rule!r})"

    def _stored(self, node: int) -> Placements:
        found = self.plan.choices[self.graph.nodes[node].key].outputs[0]
        assert found is not None
        return found

    def _input_lines(self) -> list[str]:
        lines = []
        small = {item.name: item for item in (self.tiny or self.graph).inputs}
        for item in self.graph.inputs:
            ref = TensorRef(item.node, 0)
            full, tiny = self.graph.meta(ref), self.tiny_nodes.meta(ref)
            high = "None"
            if item.high is not None:
                tiny_high = small[item.name].high
                high = self.sizes.number(item.high, item.high if tiny_high is None else tiny_high)
            shape = self.sizes.shape(full.shape, tiny.shape)
            layout = self.layouts.name(self._stored(item.node))
            lines.append(f'        "{item.name}": ({shape}, {layout}, {dtype_text(full.dtype)}, {high}),')
        return lines

    def _divisible_lines(self) -> list[str]:
        """Every (dim, axes) at which some tensor of the plan is split."""
        found: dict[tuple[str, tuple[str, ...]], None] = {}
        for index, node in enumerate(self.graph.nodes):
            choice, tiny = self.plan.choices[node.key], self.tiny_nodes.node(index)
            for full_meta, tiny_meta, placements in zip(node.outputs, tiny.outputs, choice.outputs, strict=True):
                if full_meta is not None and tiny_meta is not None and placements is not None:
                    self._add_splits(full_meta.shape, tiny_meta.shape, placements, found)
        for r in self.plan.redistributions:
            ref = TensorRef(self.graph.node_by_key[r.tensor[0]], r.tensor[1])
            for step in r.steps:
                self._add_splits(self.graph.meta(ref).shape, self.tiny_nodes.meta(ref).shape, step.target, found)
        return [
            f'        ("{dim}", {dim}, {axes!r}),'.replace("'", '"')
            for dim, axes in sorted(found)
            if not any(dim == other and set(axes) < set(more) for other, more in found)
        ]

    def _add_splits(
        self,
        full: tuple[int, ...],
        tiny: tuple[int, ...],
        placements: Placements,
        found: dict[tuple[str, tuple[str, ...]], None],
    ) -> None:
        for dim, (a, b) in enumerate(zip(full, tiny, strict=True)):
            axes = tuple(name for name, one in zip(self.sizes.axis_names, placements, strict=True) if one == Shard(dim))
            if axes:
                found[self.sizes.number(a, b), axes] = None


def _list_text(names: list[str]) -> str:
    items = [f'"{name}"' for name in names]
    one = f"[{', '.join(items)}]"
    return one if len(one) <= 80 else "\n".join(["[", *wrapped(items, "    "), "]"])


def _table(entries: Iterable[tuple[str, str]]) -> list[str]:
    """Lines `name: entry` of a dict. Names that differ only in the layer number share a line."""
    groups: dict[tuple[str, str], list[int | None]] = {}
    for name, entry in entries:
        groups.setdefault((without_layer(name), entry), []).append(layer_of(name))
    lines = []
    for (name, entry), layers in groups.items():
        if layers[0] is None:
            lines.append(f"        {name!r}: {entry},")
        else:
            pattern = name.replace("*", "{i}", 1)
            lines.append(f'        **{{f"{pattern}": {entry} for i in {_range_text([n for n in layers if n is not None])}}},')
    return [line.replace("'", '"') for line in lines]


_BLOCKS_TITLE = "# ---- the planned computation: pieces in, pieces out; a comment gives each result's layout\n"

_STAND_IN_LOSS = "loss       stand-in loss: sum of squares of the outputs that need gradients; the model returns no loss"


def _commands(plan: Plan, *, has_tiny: bool) -> list[str]:
    """How the file is verified and started, with the numbers of this plan."""
    small = _small_mesh(plan)
    devices, per_node = plan.mesh.num_devices, min(plan.gpus_per_node, plan.mesh.num_devices)
    nodes = -(-devices // per_node)
    launch = "--standalone" if nodes == 1 else f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    small_sizes, checked = (" --tiny", "small sizes") if has_tiny else ("", "full sizes")
    run = f"torchrun --standalone --nproc_per_node={math.prod(small)} train.py --device cpu{small_sizes}"
    return [
        "verify     python train.py --dry-run     full sizes, without devices: shapes, and collectives as planned",
        f"           python train.py --check       {checked}, fp32, threads as ranks: loss and every gradient as unsharded",
        f"try        {run} --mesh {','.join(map(str, small))} --steps 3",
        f"train      torchrun {launch} --nproc_per_node={per_node} train.py --compile --save DIR",
        "           python train.py --help        data files, resuming, accumulation, logs, profiles",
        "The order of the mesh axes is part of the plan: the last axis must stay on the nearest devices (torchrun numbers ranks",
        "node by node). Not run where this file was made: GPU kernels, NCCL, the CUDA branch of attention.",
    ]


def _small_mesh(plan: Plan) -> tuple[int, ...]:
    """Four ranks or fewer: the last two axes of more than one device at 2, others at 1."""
    large = [axis for axis, size in enumerate(plan.mesh.axis_sizes) if size > 1][-2:]
    return tuple(2 if axis in large else 1 for axis in range(plan.mesh.num_axes))


def template(name: str) -> str:
    return files("planner.exporting").joinpath("templates", f"{name}.py.txt").read_text()


def _fill(text: str, marks: dict[str, str]) -> str:
    return re.sub(r"@@([A-Z_]+)@@", lambda match: marks[match[1]], text)


def _helpers(blocks: str) -> str:
    """The helpers of ops that the blocks call, and what these call themselves."""
    parts = re.split(r"^@@(\w+)@@\n", template("op_helpers"), flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    needed, text = [], blocks
    for name in reversed(sections):
        functions = re.findall(r"^def (\w+)", sections[name], flags=re.M)
        if any(f"{function}(" in text for function in functions):
            needed.append(name)
            text += sections[name]
    return "\n\n\n".join(sections[name].strip("\n").replace("\n\ndef ", "\n\n\ndef ") for name in sections if name in needed)


def _targets(names: Iterable[str]) -> str:
    """The left side of an unpacking assignment."""
    names = list(names)
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names)


def _plain(text: str) -> str:
    """Text of the user inside the docstring: printable, without quotes or backslashes."""
    return re.sub(r"[^\w .,:=/()+-]", "?", text)


def _paragraph(title: str, items: list[str]) -> list[str]:
    lines = wrapped(items, " " * len(title), 126)
    lines[-1] = lines[-1].rstrip(",")
    return [title + lines[0].strip(), *lines[1:]]


def _dict_text(values: object) -> str:
    return repr(dict(values)).replace("'", '"')  # type: ignore[call-overload]


def _nested_dict_text(values: dict[str, dict[str, int]]) -> str:
    lines = ["{"]
    for key, inner in values.items():
        items = [f'"{name}": {count}' for name, count in inner.items()]
        one = f'    "{key}": {{{", ".join(items)}}},'
        lines += [one] if len(one) <= 130 else [f'    "{key}": {{', *wrapped(items, " " * 8), "    },"]
    return "\n".join([*lines, "}"])


def _range_text(layers: list[int]) -> str:
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"range({layers[0]}, {layers[-1] + 1})" if layers[0] else f"range({layers[-1] + 1})"
    return repr(layers)
