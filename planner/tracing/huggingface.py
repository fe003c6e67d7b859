"""Causal language models of the transformers library, built from a config: `hf:path/to/config.json` or `hf:llama`.

Nothing is downloaded and no weights are read: the config alone gives the module, with fresh parameters in float32. The loss is
the model's own (labels are shifted inside). `hf:llama` takes the defaults of the library's class; fields may follow, as in
`hf:mixtral,num_hidden_layers=2,attention_dropout=0`.

transformers is an optional extra; it is imported when such a model is asked for, and nothing in it is changed.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.errors import InputError, UnknownModelError
from planner.tracing import experts

PREFIX = "hf:"
DEFAULT_SEQ = 2048
"""Sequence length where none is asked for, if the model takes that many positions."""

_FORM = "hf:path/to/config.json or hf:ARCHITECTURE (hf:llama), then ,field=value for fields to change"
_FIELD = re.compile(r",(?=[A-Za-z_]\w*=)")


def factory(model: str) -> Callable[..., Any]:
    """`hf:...` -> a factory that accepts `batch`, `seq`, `layers` and `size`.

    Raises:
        InputError: transformers is not installed, or the config cannot be used.
        UnknownModelError: no such file or architecture.
    """
    config = read_config(model)

    def make(
        *, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full"
    ) -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
        return build(model, config, batch=batch, seq=seq, layers=layers, size=size)

    make.tiny_takes_seq = True  # type: ignore[attr-defined]
    return make


def build(
    model: str, config: Any, *, batch: int | None, seq: int | None, layers: int | None, size: str
) -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    """(module in train mode, (), {"input_ids", "labels"}), both inputs int64 [batch, seq]."""
    length = seq or _default_seq(config)
    if layers is not None:
        config = with_layers(config, layers)
    if size == "tiny":
        config, batch, length = tiny_config(config, length), TINY_BATCH, _tiny_seq(config, length)
    module = _module(model, config)
    batch = batch or 1
    vocab = int(config.vocab_size)
    sizes = named_sizes(config, batch, length)
    module.plan_sizes = lambda: sizes  # type: ignore[assignment]
    module.plan_inputs = lambda: {name: {"batch_dim": 0, "high": vocab} for name in ("input_ids", "labels")}  # type: ignore[assignment]
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    return module, (), {"input_ids": tokens, "labels": torch.zeros_like(tokens)}


# ---- configs -----------------------------------------------------------------------------------------------------------


def read_config(model: str) -> Any:
    """The config that a model id names, with its changed fields; of a model of several parts that of its language model."""
    what, *changes = _FIELD.split(model.removeprefix(PREFIX))
    library = _library()
    if what.endswith(".json") or "/" in what or Path(what).is_dir():
        config = _config_in_file(library, Path(what).expanduser())
    else:
        if what not in library.configs:
            raise UnknownModelError(
                f"transformers {library.version} has no architecture {what!r}", hint=f"A model is given as {_FORM}."
            )
        config = library.configs[what]()
    return _changed(config.get_text_config(), dict(_field(change, model) for change in changes))


def _config_in_file(library: _Library, path: Path) -> Any:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UnknownModelError(f"there is no file {path}", hint=f"A model is given as {_FORM}, relative to {Path.cwd()}.")
    try:
        data = json.loads(path.read_text())
        kind = data["model_type"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is no config of a transformers model: {error!r}", hint="It has to be a JSON object with a model_type."
        ) from error
    if kind not in library.configs:
        raise UnknownModelError(
            f"{path} names the architecture {kind!r}, which transformers {library.version} does not have",
            hint="Code that comes with a checkpoint is not run; give such a model as file.py:factory.",
        )
    if data.get("quantization_config"):
        raise InputError(f"{path} describes quantised weights", hint="Remove quantization_config: training is planned in full.")
    try:
        return library.configs[kind].from_dict(data)
    except Exception as error:
        raise InputError(f"{path} is refused by transformers: {error}", hint="Correct the field it names.") from error


def _field(change: str, model: str) -> tuple[str, Any]:
    name, _, value = change.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"[\w.-]+", value):
            return name, value
        raise InputError(
            f"{value!r} is no value for the field {name} of {model}", hint="Give a number, a word or None."
        ) from None


def _changed(config: Any, fields: Mapping[str, Any]) -> Any:
    """A copy with other values; fields that the class derives from them are derived anew."""
    data = config.to_dict()
    unknown = [name for name in fields if name not in data and name not in config.attribute_map]
    if unknown:
        raise InputError(
            f"the config of {config.model_type} has no field {', '.join(unknown)}",
            hint=f"It has {', '.join(sorted(name for name in data if not name.startswith('_')))}.",
        )
    data |= {config.attribute_map.get(name, name): value for name, value in fields.items()}
    try:
        return type(config).from_dict(data)
    except Exception as error:
        raise InputError(
            f"the config of {config.model_type} does not take {', '.join(f'{k}={v}' for k, v in fields.items())}: {error}",
            hint="Give values that fit together.",
        ) from error


def with_layers(config: Any, layers: int) -> Any:
    """The first `layers` layers; lists with one entry per layer are cut."""
    depth = int(config.num_hidden_layers)
    lists = {name: value[:layers] for name, value in config.to_dict().items() if _is_per_layer(value, depth) and layers < depth}
    if layers > depth and any(_is_per_layer(value, depth) for value in config.to_dict().values()):
        raise InputError(f"the config describes {depth} layers one by one, not {layers}", hint=f"Give --layers up to {depth}.")
    return _changed(config, {"num_hidden_layers": layers, **lists})


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth


_CHANCE = ("layerdrop", "router_jitter_noise", "router_z_loss_jitter", "drop_path_rate")


def _refuse_chance(config: Any) -> None:
    """Fields by which forward leaves out or shakes whole parts at random: it could not be the same on all devices."""
    found = [f"{name}={value}" for name in _CHANCE if (value := getattr(config, name, 0)) and value > 0]
    if found:
        raise InputError(
            f"the config of {config.model_type} makes forward draw random numbers: {', '.join(found)}",
            hint="Set the field to 0 in the config, or behind its name: hf:ARCHITECTURE," + found[0].partition("=")[0] + "=0.0.",
        )


# ---- modules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Library:
    """What is used of transformers: its version, classes of configs by name, causal language models by class of config."""

    version: str
    configs: Any
    causal_lms: Any


def _library() -> _Library:
    """Imports transformers, which takes seconds."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported: kernels are not looked for elsewhere
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "models of transformers need that library, which is not installed", hint="pip install 'plan-explorer[hf]'"
        ) from error
    return _Library(transformers.__version__, transformers.CONFIG_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)


def _module(model: str, config: Any) -> nn.Module:
    """In train mode, without a cache; attention as torch's own operator where the class can."""
    library = _library()
    if type(config) not in library.causal_lms:
        raise InputError(f"{config.model_type} is no causal language model", hint="Give another model as file.py:factory.")
    _refuse_chance(config)
    kind = library.causal_lms[type(config)]
    config.use_cache = False
    implementation = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    try:
        found: nn.Module = kind._from_config(
            config, dtype=torch.float32, attn_implementation=implementation, experts_implementation=experts.register()
        )
    except Exception as error:
        raise InputError(
            f"transformers cannot build {model}: {type(error).__name__}: {error}", hint="Correct the config."
        ) from error
    return found.train()


def _default_seq(config: Any) -> int:
    return min(DEFAULT_SEQ, int(getattr(config, "max_position_embeddings", None) or DEFAULT_SEQ))


_NAMED = {
    "V": ("vocab_size",),
    "D": ("hidden_size",),
    "F": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "H": ("num_attention_heads",),
    "KV": ("num_key_value_heads", "num_kv_heads"),
    "HD": ("head_dim",),
    "E": ("num_experts", "num_local_experts", "n_routed_experts"),
    "FE": ("moe_intermediate_size",),
    "FS": ("shared_expert_intermediate_size",),
    "QR": ("q_lora_rank",),
    "KR": ("kv_lora_rank",),
    "ST": ("state_size", "mamba_d_state"),
}


def named_sizes(config: Any, batch: int, seq: int) -> dict[str, int]:
    """Names for the sizes that occur in shapes; sizes the config does not state are left out."""
    sizes = {"B": batch, "S": seq}
    for name, fields in _NAMED.items():
        found = next((value for field in fields if isinstance(value := getattr(config, field, None), int)), None)
        if found:
            sizes[name] = found
    heads = sizes.get("H")
    if heads and "HD" not in sizes and sizes["D"] % heads == 0:
        sizes["HD"] = sizes["D"] // heads
    return sizes


# ---- tiny size ---------------------------------------------------------------------------------------------------------
TINY_BATCH, TINY_SEQ = 4, 20
_TINY_HEAD = 8
_TINY = {
    "vocab_size": 208, "intermediate_size": 176, "n_inner": 176, "ffn_dim": 176, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 112, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "q_lora_rank": 56, "kv_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 4,
    "state_size": 12, "mamba_d_state": 12, "mamba_dt_rank": 4, "time_step_rank": 4, "linear_num_key_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "n_groups": 4, "mamba_n_groups": 4,
}  # fmt: skip
"""Sizes of `size="tiny"`, where the config has the field and a larger value. Those that can be split divide by 4."""


def tiny_config(config: Any, seq: int) -> Any:
    """The same structure and depth with small dims: every relation that decides the structure is kept (heads per group, hidden
    size as heads times head size, a window narrower than the sequence, the sequence as chunks)."""
    data = config.to_dict()
    fields: dict[str, Any] = {name: min(value, data[name]) for name, value in _TINY.items() if isinstance(data.get(name), int)}
    fields |= _tiny_heads(config)
    hidden = fields["hidden_size"]
    if isinstance(data.get("word_embed_proj_dim"), int):
        fields["word_embed_proj_dim"] = hidden if data["word_embed_proj_dim"] == config.hidden_size else 40
    if isinstance(data.get("ffn_hidden_size"), int):
        fields["ffn_hidden_size"] = hidden * (data["ffn_hidden_size"] // config.hidden_size)
    if isinstance(data.get("num_experts_per_tok"), int):
        fields["num_experts_per_tok"] = min(data["num_experts_per_tok"], 2)
    if isinstance(data.get("topk_group"), int):
        fields["topk_group"] = min(data["topk_group"], 2)
    for heads, size, expand in (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand")):
        if heads in data and expand in data:  # state-space layers: heads times their size is the widened hidden size
            fields[heads], fields[size] = 8, data[expand] * hidden // 8
            fields |= {"mamba_d_ssm": data[expand] * hidden} if data.get("mamba_d_ssm") else {}
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(data.get(name), int):
            fields[name] = 12 if data[name] < seq else 64
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(data.get(name), int):
            fields[name] = min(data[name], fields["vocab_size"] - 1)
    return _changed(config, fields)


def _tiny_seq(config: Any, seq: int) -> int:
    """Recurrent layers are unrolled, over positions or chunks, so their structure depends on the length."""
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    return TINY_SEQ if kinds <= {"full_attention", "sliding_attention", "chunked_attention"} else seq


def _tiny_heads(config: Any) -> dict[str, int]:
    """Attention heads, head size and hidden size. 4 or 8 heads; 12 where the number is no power of two (ALiBi slopes differ)."""
    heads, hidden = int(getattr(config, "num_attention_heads", 0) or 0), int(config.hidden_size)
    if not heads:
        return {"hidden_size": 64}
    field = next((name for name in ("num_key_value_heads", "num_kv_heads") if name in config.to_dict()), None)
    shared = int(getattr(config, field, None) or heads) if field else heads
    small_shared = 1 if shared == 1 else 4 if _is_power_of_two(shared) or shared < heads else 12
    group = heads // shared
    small = small_shared * (1 if group == 1 else 2 if _is_power_of_two(group) else 3)
    if shared == 1:
        small = 8 if _is_power_of_two(heads) else 12
    head = getattr(config, "head_dim", None)
    found = {"num_attention_heads": small, "hidden_size": small * _TINY_HEAD}
    if field:
        found[field] = small_shared
    if isinstance(head, int) and "head_dim" in config.to_dict():
        found["head_dim"] = _TINY_HEAD
        found["hidden_size"] = small * _TINY_HEAD if head * heads == hidden else 80
    return found


def _is_power_of_two(number: int) -> bool:
    return number > 0 and math.log2(number).is_integer()
