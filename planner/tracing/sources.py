"""Where models come from: samples by name, families with sizes (`decoder[dim=2048,heads=16]`), `file.py:factory`,
`program.pt2`, or `hf:config.json`.

A program is what `torch.export.save` wrote (`planner.tracing.exported_program`); `hf:` is a causal language model of transformers
(`planner.tracing.huggingface`). What follows is about factories.

A factory is any function that returns `(module, args)` or `(module, args, kwargs)`; calling `module(*args, **kwargs)` gives
the scalar loss, or a dict with a scalar `loss`; a module that returns other tensors gets a stand-in loss, see
`planner.tracing.loss`. The factory may accept the keywords `batch`, `seq`, `layers` and `size` ("full" or "tiny"); the planner
passes only those it was asked for. `size="tiny"` means the same structure and depth with small dims of its own choice (`batch`
and `seq` describe the full model and are not passed along with it); it is used to verify exported scripts with real numbers.

The module may state three things by methods, all optional:
    plan_sizes() -> {"B": 64, "S": 8192, ...}                       named sizes, so that exported shapes can be read
    plan_inputs() -> {"tokens": {"batch_dim": 0, "high": 128256}}   per input: the dim that counts samples, bound of its values
    plan_regions() -> {"exchange": {"axes": ("ep",), ...}}          per region of the user: see `planner.tracing.region`

Listing models imports no torch.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.errors import InputError, UnknownModelError
from planner.graph import ModelRequest

Factory = Callable[..., Any]
HUGGINGFACE, EXPORTED_PROGRAM = "hf:", ".pt2"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    name: str
    description: str


@dataclass(frozen=True, kw_only=True)
class _Sample:
    module: str
    factory: str
    description: str


_LLAMA3, _GPT2, _MOE, _VIT = "sample_models.llama3", "sample_models.gpt2", "sample_models.moe", "sample_models.vit"
_HYBRID, _MOE_REGION = "sample_models.hybrid", "sample_models.moe_region"
_SAMPLES = {
    "llama3-8b": _Sample(module=_LLAMA3, factory="llama3_8b", description="Llama 3, 8 billion parameters, 32 layers"),
    "llama3-70b": _Sample(module=_LLAMA3, factory="llama3_70b", description="Llama 3, 70 billion parameters, 80 layers"),
    "llama3-tiny": _Sample(module=_LLAMA3, factory="llama3_tiny", description="the Llama 3 structure with small sizes, 2 layers"),
    "gpt2-small": _Sample(
        module=_GPT2, factory="gpt2_small", description="GPT-2, 124 million parameters, 12 layers, biases, tied"
    ),
    "gpt2-xl": _Sample(module=_GPT2, factory="gpt2_xl", description="GPT-2, 1.6 billion parameters, 48 layers, biases, tied"),
    "gpt2-tiny": _Sample(module=_GPT2, factory="gpt2_tiny", description="the GPT-2 structure with small sizes, 2 layers"),
    "moe-16b": _Sample(
        module=_MOE, factory="moe_16b", description="DeepSeekMoE, 16 billion parameters, 6 of 64 experts per token"
    ),
    "moe-tiny": _Sample(
        module=_MOE, factory="moe_tiny", description="the mixture-of-experts structure with small sizes, 2 layers"
    ),
    "moe-16b-region": _Sample(
        module=_MOE_REGION,
        factory="moe_16b_region",
        description="moe-16b, its experts a user-controlled region on the mesh axis ep",
    ),
    "moe-region-tiny": _Sample(
        module=_MOE_REGION,
        factory="moe_region_tiny",
        description="moe-tiny, its experts a user-controlled region on the mesh axis ep",
    ),
    "vit-large": _Sample(module=_VIT, factory="vit_large", description="Vision transformer, 304 million parameters, 24 layers"),
    "vit-tiny": _Sample(
        module=_VIT, factory="vit_tiny", description="the vision transformer structure with small sizes, 2 layers"
    ),
    "hybrid-2.7b": _Sample(
        module=_HYBRID,
        factory="hybrid_2_7b",
        description="Mamba-2 with attention, 2.7 billion parameters, 6 of 64 layers attention",
    ),
    "hybrid-tiny": _Sample(module=_HYBRID, factory="hybrid_tiny", description="the hybrid structure with small sizes, 3 layers"),
}
_FAMILIES = {"decoder": _Sample(module="sample_models.decoder", factory="decoder", description="a decoder of any size")}
"""Named with their sizes: `decoder[dim=2048,heads=16,kv_heads=16,ffn=8192,vocab=50368,gated=0]`."""
_FORM = "file.py:factory, where factory() returns (module, args) or (module, args, kwargs), program.pt2 or hf:config.json"


def list_models() -> tuple[ModelInfo, ...]:
    return tuple(ModelInfo(name=name, description=sample.description) for name, sample in _SAMPLES.items())


def find_factory(model: str) -> Factory:
    """`llama3-8b` or `path/models.py:factory` -> the function. Runs the file's top level.

    Raises:
        UnknownModelError: no such sample, file or factory.
        InputError: the file cannot be imported.
    """
    name, bracket, sizes = model.partition("[")
    if model in _SAMPLES or (bracket and name in _FAMILIES):
        sample = _FAMILIES[name] if bracket else _SAMPLES[name]
        found: Factory = getattr(importlib.import_module(sample.module), sample.factory)
        return functools.partial(found, **_sizes_in(model, sizes, found)) if bracket else found
    if model.startswith(HUGGINGFACE):
        from planner.tracing import huggingface

        return huggingface.factory(model)
    if model.endswith(EXPORTED_PROGRAM):
        from planner.tracing import exported_program

        return exported_program.factory(model)
    path, colon, name = model.rpartition(":")
    if not colon or not path.endswith(".py"):
        near = difflib.get_close_matches(model, _SAMPLES, n=1, cutoff=0.4)
        raise UnknownModelError(
            f"there is no model {model!r}; known models are {', '.join(_SAMPLES)}",
            hint=(f"Did you mean {near[0]}? " if near else "") + f"Your own model is given as {_FORM}.",
        )
    return _factory_in_file(Path(path), name)


def _sizes_in(model: str, written: str, factory: Factory) -> dict[str, Any]:
    """`dim=2048,norm=layer]` -> keyword arguments that the factory takes."""
    accepted = inspect.signature(factory).parameters
    found: dict[str, Any] = {}
    for part in filter(None, written.removesuffix("]").split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in accepted or name in ("batch", "seq", "layers", "size") or not written.endswith("]"):
            raise UnknownModelError(
                f"{part!r} in {model!r} is not a size that this sample takes",
                hint=f"Sizes are {', '.join(n for n in accepted if n not in ('batch', 'seq', 'layers', 'size'))}.",
            )
        found[name] = int(value) if value.isdigit() else value
    return found


def sizes_for(factory: Factory, request: ModelRequest) -> dict[str, Any]:
    """The keyword arguments to call the factory with.

    Raises:
        InputError: a size was asked for that the factory does not accept.
    """
    asked: dict[str, Any] = {"layers": request.layers}
    asked.update({"size": request.size} if request.size != "full" else {"batch": request.batch, "seq": request.seq})
    if getattr(factory, "tiny_takes_seq", False):
        asked["seq"] = request.seq
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        if isinstance(value, int) and value < 1:
            raise InputError(f"{name} is {value}; it has to be 1 or more", hint=f"Leave {name} out to use the model's own.")
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return asked
    accepted = {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    refused = [f"{name}={value}" for name, value in asked.items() if name not in accepted]
    if refused:
        raise InputError(
            f"{request.model} does not take {', '.join(refused)}",
            hint=f"Its factory accepts {', '.join(sorted(accepted)) or 'no sizes'}; leave the size out or add the keyword.",
        )
    return asked


def import_source(model: str) -> tuple[str, str, dict[str, Any], str] | None:
    """How a file imports the factory: (Python module, function, sizes in the model's name, folder that holds the module or "").

    None where there is no such function (`.pt2`, `hf:`). Imports and runs nothing.
    """
    name, bracket, sizes = model.partition("[")
    if model in _SAMPLES or (bracket and name in _FAMILIES):
        sample = _FAMILIES[name] if bracket else _SAMPLES[name]
        given = (part.partition("=") for part in filter(None, sizes.removesuffix("]").split(",")))
        return sample.module, sample.factory, {key: int(value) if value.isdigit() else value for key, _, value in given}, ""
    path, colon, function = model.rpartition(":")
    if model.startswith(HUGGINGFACE) or not colon or not path.endswith(".py"):
        return None
    return Path(path).stem, function, {}, str(Path(path).resolve().parent)


def _factory_in_file(path: Path, name: str) -> Factory:
    if not path.is_file():
        raise UnknownModelError(
            f"there is no file {path}", hint=f"A model is given as {_FORM}; the path is relative to {Path.cwd()}."
        )
    module = _import_file(path)
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if _is_factory_like(module, key, value)]
        near = difflib.get_close_matches(name, own, n=1)
        raise UnknownModelError(
            f"{path} has no function {name!r}; it has {', '.join(own) or 'none'}",
            hint=(f"Did you mean {near[0]}? " if near else "") + f"A model is given as {_FORM}.",
        )
    factory: Factory = found
    return factory


def _is_factory_like(module: ModuleType, key: str, value: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")


def _import_file(path: Path) -> ModuleType:
    """Import as a registered module of a name unique to the path, so that forward finds the file's globals.

    The file is read afresh each time. While it runs, its folder can be imported from.
    """
    resolved = path.resolve()
    name = f"planner_user_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None, resolved
    linecache.checkcache(str(resolved))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        code = compile(resolved.read_bytes(), str(resolved), "exec", dont_inherit=True)  # not the cached bytecode: it may be old
        exec(code, module.__dict__)
    except SyntaxError as error:
        del sys.modules[name]
        raise InputError(
            f"{path}:{error.lineno} is not valid Python: {error.msg}", hint="Correct the line; nothing was loaded."
        ) from error
    except Exception as error:
        del sys.modules[name]
        raise InputError(
            f"{path} cannot be imported: {type(error).__name__}: {error} (line {_line_in(resolved, error)})",
            hint=f"The file has to run with `python {path.name}` in its own folder.",
        ) from error
    finally:
        sys.path.remove(str(resolved.parent))
    return module


def _line_in(path: Path, error: BaseException) -> int:
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
