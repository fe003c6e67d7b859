"""Training runs as sources describe them -> what the planner is asked: a model, a mesh, a recipe, a way of checkpointing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.accuracy.labels import profile_name
from planner.accuracy.rows import Fields, Skip, count, counts, needed, number
from planner.hardware import load_profile
from planner.hardware_changes import HIGHEST, LOWEST
from planner.mesh import Mesh
from planner.recipes import Recipe

YES, NO = ("true", "1", "1.0", "yes", "inductor", "torch.compile"), ("false", "0", "0.0", "no")
COMPILED_FRAMEWORKS = re.compile(r"max|pax|jax", re.IGNORECASE)
CUDNN_FRAMEWORKS = re.compile(r"max|pax|jax|nemo|megatron|\bTE\b|transformer.engine", re.IGNORECASE)
"""Their attention is cuDNN's on Hopper and later; others run FlashAttention 2."""
BIASED = re.compile(r"mpt|bloom", re.IGNORECASE)
"""Models whose attention adds a bias by distance (ALiBi)."""
SPLITS_PRODUCTS = re.compile(r"nemo|megatron-core", re.IGNORECASE)
"""Frameworks that cut tensor-parallel products into pieces, so that the exchange of one piece runs beside the next."""
GPT_LIKE = re.compile(r"gpt|mpt|opt|bloom|megatron|nemotron", re.IGNORECASE)
TIED = re.compile(r"mpt|gpt|megatron", re.IGNORECASE)
SIXTEEN_BITS = re.compile(r"(amp[ _-]?|mixed[ _-]?)?(bf16|bfloat16|fp16|float16)", re.IGNORECASE)
"""Products of either kind run at the same rate and move the same bytes."""
POLICIES = {"none": "none", "no": "none", "full": "full", "selective op": "ops", "": "auto"}
"""Policies of sources -> `none`, `full`, `ops` (`steps.every_other_product`) or `auto` (as memory allows). Recomputing the core
of attention, Megatron's `selective`, is what `none` does with a fused attention; but others call other things selective."""
CLOSE = 0.03
"""Sources round their numbers of parameters."""
FREES_ROOT = re.compile(r"max|pax|jax|SimpleFSDP|autoparallel", re.IGNORECASE)
"""Ways to shard parameters that do not keep those outside the layers, as FSDP 1 and 2 do."""
NETWORK_NOTE = re.compile(r"(\d+(?:\.\d+)?) ?(?:Gb/s|Gbps)(?: per node| node-node)", re.IGNORECASE)
"""What a node has towards others, all cards together."""
FSDP_1 = re.compile(r"fsdp ?1|llm-foundry|composer", re.IGNORECASE)
"""Sums gradients in the dtype of computing unless told otherwise (`reduce_dtype` of torch.distributed.fsdp.MixedPrecision)."""
MASTER = re.compile(r"fp32 (grad|master)", re.IGNORECASE)
"""Precisions with parameters in bf16, and fp32 copies of them in the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training step. `batch` counts sequences of one micro-step over all devices; `accumulation` micro-steps make a step.

    `zero` 1 or 2: parameters whole, optimizer state split over the data ranks. `attention` is its library, "" for the usual one.
    `hides_exchanges`: activations are exchanged beside the products that make them. `has_master`: see MASTER.
    `narrow_sums`: gradients are summed in 16 bits. `keeps_root`: parameters outside the layers stay gathered for the whole step.
    """

    model: str
    layers: int
    seq: int
    hardware: str
    mesh: Mesh
    recipes: tuple[Recipe, ...]
    batch: int
    accumulation: int
    checkpoint: str
    compiled: bool
    zero: int
    attention: str = ""
    hides_exchanges: bool = False
    has_master: bool = False
    keeps_root: bool = False
    narrow_sums: bool = False

    @property
    def data_ranks(self) -> int:
        """Devices that work on different samples."""
        return self.mesh.num_devices // self._size("tp")

    @property
    def shards_parameters(self) -> bool:
        return self._size("fsdp") > 1

    def _size(self, axis: str) -> int:
        return self.mesh.axis_sizes[self.mesh.axis_names.index(axis)] if axis in self.mesh.axis_names else 1


def decoder_name(row: Fields) -> str:
    """The sample `decoder` with the sizes of the row; GPT-like families have an MLP of two matrices and layer norms."""
    dim, heads, ffn, vocab = counts(row, "hidden", "heads", "ffn", "vocab")
    kv_heads = count(row, "kv_heads", heads)
    gpt = bool(GPT_LIKE.search(row.get("model", "")))
    sizes = {"dim": dim, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab, "gated": int(not gpt)}
    sizes |= {"tied": int(bool(TIED.search(row.get("model", ""))))}
    return f"decoder[{','.join(f'{k}={v}' for k, v in sizes.items())},norm={'layer' if gpt else 'rms'}]"


def run_of(row: Fields) -> Run:
    """A row of `e2e_training*`. Raises Skip with the first reason why it cannot be planned."""
    _refuse(row)
    dp, fsdp, tp = _degrees(row)
    layers, seq = counts(row, "layers", "seq")
    micro_batch, accumulation = _batches(row, dp * fsdp)
    mesh, recipes = parallelism(dp, fsdp, tp, row.get("sp", "").lower() not in NO)
    compiled = row.get("compile", "").lower() in YES or bool(COMPILED_FRAMEWORKS.search(row.get("framework", "")))
    return Run(
        model=decoder_name(row), layers=layers, seq=seq, hardware=_hardware(row), mesh=mesh, recipes=recipes,
        batch=micro_batch * dp * fsdp, accumulation=accumulation, checkpoint=POLICIES[row["ac_policy"].lower()],
        compiled=compiled, zero=int(number(row, "zero") or 0),
        attention=_library(row), hides_exchanges=bool(SPLITS_PRODUCTS.search(row.get("framework", ""))),
        has_master=bool(MASTER.search(row["precision"])),
        narrow_sums=fsdp > 1 and bool(FSDP_1.search(row.get("framework", ""))),
        keeps_root=fsdp > 1 and not FREES_ROOT.search(row.get("framework", "") + row.get("compile", "")),
    )  # fmt: skip


def _degrees(row: Fields) -> tuple[int, int, int]:
    """Of replicas, sharded data and tensor parallelism. Replicas are what is left if they are not stated; so is one way of
    tensor parallelism if the others make up all GPUs."""
    (gpus,), fsdp, dp = counts(row, "gpus"), count(row, "fsdp", 1), count(row, "dp", 0)
    tp = count(row, "tp", 1 if max(dp, 1) * fsdp == gpus > 1 else 0)
    if not tp:
        raise Skip("tp is not stated")
    dp = dp or max(1, gpus // (tp * fsdp))
    if dp * fsdp * tp != gpus:
        raise Skip("degrees do not multiply to the number of GPUs")
    return dp, fsdp, tp


def _batches(row: Fields, ranks: int) -> tuple[int, int]:
    """(sequences of a micro-step per data rank, micro-steps), from two of the three numbers that sources give."""
    accumulation = count(row, "grad_accum", 0)
    if number(row, "global_batch") is None and accumulation:
        return counts(row, "micro_batch")[0], accumulation
    if number(row, "micro_batch") is None and accumulation:
        micro_batch, rest = divmod(counts(row, "global_batch")[0], accumulation * ranks)
    else:
        (micro_batch, global_batch) = counts(row, "micro_batch", "global_batch")
        accumulation, rest = divmod(global_batch, micro_batch * ranks)
    if rest or not accumulation or not micro_batch:
        raise Skip("global batch is no multiple of the micro batches")
    return micro_batch, accumulation


def _hardware(row: Fields) -> str:
    """The profile, with the bandwidth between nodes that the row notes."""
    name = profile_name(row["gpu"])
    noted = NETWORK_NOTE.search(row.get("note", ""))
    if noted is None:
        return name
    profile = load_profile(name)
    factor = float(noted[1]) * 1e9 / 8 / profile.gpus_per_node / profile.fabric.nic_bytes_per_s
    return name if abs(factor - 1) < CLOSE or not LOWEST <= factor <= HIGHEST else f"{name}@network={factor:.6g}"


def _library(row: Fields) -> str:
    if CUDNN_FRAMEWORKS.search(row.get("framework", "")):
        return ""
    return "fa2_bias" if BIASED.search(row.get("model", "")) else "fa2"


def _refuse(row: Fields) -> None:
    if (number(row, "pp") or 1) > 1:
        raise Skip("pipeline stages")
    if (number(row, "cp") or 1) > 1:
        raise Skip("context parallelism")
    arch = row.get("arch", "").lower()
    if arch != "dense" and (arch or not _counts_as_dense(row)):
        raise Skip(f"no builder for models of kind {arch or 'unstated'}")
    if re.search(r"lora|sft|finetune", row.get("model", "") + row.get("group", ""), re.IGNORECASE):
        raise Skip("fine-tuning: frozen weights or packed sequences")
    if not SIXTEEN_BITS.match(row.get("precision", "")):
        raise Skip(f"precision is not bf16 but {row.get('precision') or 'unstated'}")
    if row.get("ac_policy", "").lower() not in POLICIES:
        raise Skip("recompute policy that plans do not have (chosen ops)")
    if row.get("reliability", "").lower() == "low":
        raise Skip("source marked as of low reliability")


def _counts_as_dense(row: Fields) -> bool:
    """Whether a dense decoder of these sizes has the number of parameters that is stated; no other kind does."""
    if number(row, "params_B") is None:
        return False
    layers, dim, heads, ffn, vocab = counts(row, "layers", "hidden", "heads", "ffn", "vocab")
    kv_heads = count(row, "kv_heads", heads)
    gpt = bool(GPT_LIKE.search(row.get("model", "")))
    layer = dim * dim * (2 + 2 * kv_heads / heads) + (2 if gpt else 3) * dim * ffn
    tables = 1 if TIED.search(row.get("model", "")) else 2
    return abs((layers * layer + tables * vocab * dim) / (needed(row, "params_B")[0] * 1e9) - 1) < CLOSE


def parallelism(dp: int, fsdp: int, tp: int, sequence: bool) -> tuple[Mesh, tuple[Recipe, ...]]:
    """Replicas outermost, tensor parallelism on the nearest devices."""
    sizes = {"dp": dp, "fsdp": fsdp, "tp": tp}
    names = tuple(name for name, size in sizes.items() if size > 1) or ("dp",)
    mesh = Mesh(axis_names=names, axis_sizes=tuple(sizes[name] for name in names))
    recipes = []
    if dp > 1 and fsdp > 1:
        recipes.append(Recipe(name="hsdp", axes=("dp", "fsdp")))
    elif fsdp > 1:
        recipes.append(Recipe(name="fsdp", axes=("fsdp",)))
    elif dp > 1:
        recipes.append(Recipe(name="ddp", axes=("dp",)))
    if tp > 1:
        recipes.append(Recipe(name="tp_sp" if sequence else "tp", axes=("tp",)))
    return mesh, tuple(recipes)


def vtrain_run(row: Fields) -> Run:
    """A row of `vtrain_*`: GPT of width `hidden` on A100, vocabulary and recomputation not stated (51,200 and full
    assumed), attention as in Megatron-LM before fused kernels: products, softmax and dropout one by one."""
    gpus, tp, dp, pp = counts(row, "gpus", "tp", "dp", "pp")
    if pp > 1:
        raise Skip("pipeline stages")
    if dp * tp != gpus:
        raise Skip("degrees do not multiply to the number of GPUs")
    dim, heads, layers, seq = counts(row, "hidden", "heads", "layers", "seq")
    micro_batch, global_batch = counts(row, "micro_batch", "global_batch")
    accumulation, rest = divmod(global_batch, micro_batch * dp)
    if rest or not accumulation:
        raise Skip("global batch is no multiple of the micro batches")
    sizes = f"dim={dim},heads={heads},kv_heads={heads},ffn={4 * dim},vocab=51200,gated=0,tied=1,biases=1,norm=layer"
    mesh, recipes = parallelism(dp, 1, tp, False)
    return Run(
        model=f"decoder[{sizes},positions=learned]", layers=layers, seq=seq, hardware="a100_80gb", mesh=mesh, recipes=recipes,
        batch=micro_batch * dp, accumulation=accumulation, checkpoint="full", compiled=False, zero=0, attention="math",
    )  # fmt: skip
