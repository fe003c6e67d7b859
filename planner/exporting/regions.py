"""User-controlled regions in an exported file: the import of the user's function, its contract in comments, and its calls."""

from __future__ import annotations

from collections.abc import Iterable

from planner.errors import ExportError
from planner.exporting.ops import Site, lowering
from planner.graph import JointGraph
from planner.region import REGION, REGION_BACKWARD, Region


def regions_of(graph: JointGraph) -> dict[str, Region]:
    """Distinct functions, by the name they have in the file: the first contract of each."""
    found: dict[str, Region] = {}
    for node in graph.nodes:
        if node.op == REGION:
            region = Region.loads(node.args[0])
            known = found.setdefault(variable(region), region)
            if known.module != region.module:
                raise ExportError(
                    f"two regions are called {region.function}, in {known.module} and in {region.module}",
                    hint="Give the functions different names.",
                )
    return found


def variable(region: Region) -> str:
    """Capitals: names of values in the file have none."""
    return f"REGION_{region.function}"


def import_lines(graph: JointGraph) -> str:
    """The part of the file that imports the functions; "" if there are none."""
    found = regions_of(graph)
    if not found:
        return ""
    lines = ["# ---- user-controlled regions: the model's own functions, run on local pieces; what they communicate is their own"]
    for region in found.values():
        lines += [f"# {line}" for line in contract_lines(region)]
    lines.append("try:")
    lines += [f"    from {region.module} import {region.function} as {name}" for name, region in found.items()]
    modules = ", ".join(dict.fromkeys(region.module for region in found.values()))
    lines += [
        "except ImportError as error:",
        f'    raise SystemExit("this file runs functions of {modules}: put that beside it or on PYTHONPATH") from error',
    ]
    return "\n".join(lines)


def operator_lines(graph: JointGraph) -> str:
    """The part of the file that imports the modules which register the model's own operators; "" if it has none."""
    unknown = [op for op, module in graph.operators if not module]
    if unknown:
        raise ExportError(
            f"it is not known what to import for the operator {', '.join(unknown)}",
            hint="Register it with the decorator torch.library.custom_op, in a Python module.",
        )
    modules: dict[str, list[str]] = {}
    for op, module in graph.operators:
        modules.setdefault(module, []).append(op.rpartition(".")[0])
    if not modules:
        return ""
    lines = ["# ---- operators of the model's own", "try:"]
    lines += [f"    import {module}  # noqa: F401 - registers {', '.join(names)}" for module, names in modules.items()]
    lines += [
        "except ImportError as error:",
        f'    raise SystemExit("this file uses operators of {", ".join(modules)}: put that on PYTHONPATH") from error',
    ]
    return "\n".join(lines)


def contract_lines(region: Region) -> Iterable[str]:
    names = region.axes or tuple(f"mesh axis {number}" for number in range(len(region.rows)))
    yield f"{region.module}.{region.function}: operands -> outputs; gradients of operands"
    yield from (f"    over {name}: {row}" for name, row in zip(names, region.rows, strict=True))
    yield from (f"    over another axis, if the plan wants: {row}" for row in region.elsewhere)
    yield "    over another axis: copies"
    if region.collectives is None:
        yield "    communication inside: unknown, not in the predicted time"
    else:
        yield f"    communication inside, as stated: {', '.join(dict.fromkeys(map(str, region.collectives))) or 'none'}"


@lowering(REGION)
def _run(site: Site) -> str:
    region = Region.loads(site.node.args[0])
    return f"run_region({', '.join([variable(region), _arguments(site, 1), _shapes(site), *_keywords(site)])})"


@lowering(REGION_BACKWARD)
def _gradients(site: Site) -> str:
    """Gradients of the wanted operands; the function runs once more."""
    region = Region.loads(site.node.args[0])
    given = f"[{', '.join(site.argument(ref, ref) for ref in site.node.args[1])}]"
    wanted = repr(list(site.node.args[3]))
    return f"region_gradients({', '.join([variable(region), _arguments(site, 2), given, wanted, *_keywords(site)])})"


def _arguments(site: Site, position: int) -> str:
    """Tensors and constants in the order of the call."""
    full, tiny = Region.loads(site.node.args[0]), Region.loads(site.tiny.args[0])
    written = [site.argument(ref, ref) for ref in site.node.args[position]]
    for (at, value), (_, small) in zip(full.constants, tiny.constants, strict=True):
        written.insert(at, site.argument(value, small))
    return f"[{', '.join(written)}]"


def _keywords(site: Site) -> list[str]:
    full, tiny = Region.loads(site.node.args[0]), Region.loads(site.tiny.args[0])
    given, small = {k: v for k, v in full.keywords if k != "mesh"}, dict(tiny.keywords)
    found = [f"{name}={site.argument(value, small[name])}" for name, value in given.items()]
    return [*found, *(["mesh=local.place.mesh"] if full.takes_mesh else [])]


def _shapes(site: Site) -> str:
    every = [site.local_shape(n) if meta is not None else "None" for n, meta in enumerate(site.node.outputs)]
    return f"[{', '.join(every)}]"
