"""The mixture-of-experts transformer of `moe.py` with its dispatch written by hand: a user-controlled region.

The routed experts are one function on local tensors, `exchange_experts`, wrapped by `local_map`: it puts tokens into the slots of
their experts, sends slots to the devices that hold these experts (all-to-all over the mesh axis `ep`), runs the experts it has,
sends results back and adds them up per token. The planner keeps it whole; router, attention, shared expert and the rest are
planned as always. Numbers are those of `moe.py`, and so are the sizes.

Without a mesh (`mesh=None`) the function holds all experts and sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from sample_models import moe

Made = moe.Made


def exchange_experts(
    x: Tensor, slot: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, capacity: int, mesh: DeviceMesh | None = None
) -> Tensor:
    """x [batch, seq, dim], slot [batch, seq * top], weights [batch, seq, top] -> [batch, seq, dim].

    `slot` counts expert * capacity + place, over the experts of all devices; one beyond the last means that the expert was full.
    w1, w3 [experts here, ffn, dim] and w2 [experts here, dim, ffn] are the experts of this device.
    """
    batch, seq, dim = x.shape
    top, group = weights.shape[2], None if mesh is None else mesh.get_group("ep")
    devices = 1 if group is None else group.size()
    experts = devices * w1.shape[0]
    filled = to_experts(fill(x, slot, top, experts * capacity).view(batch, experts, capacity, dim), devices, group)
    hidden = F.silu(torch.einsum("becd,efd->becf", filled, w1)) * torch.einsum("becd,efd->becf", filled, w3)
    made = to_tokens(torch.einsum("becf,edf->becd", hidden, w2), devices, group).reshape(batch, experts * capacity, dim)
    back = made.gather(1, slot.clamp(max=experts * capacity - 1).unsqueeze(-1).expand(-1, -1, dim))
    return (back.view(batch, seq, top, dim) * weights.unsqueeze(-1)).sum(2)


def fill(x: Tensor, slot: Tensor, top: int, slots: int) -> Tensor:
    """x [batch, seq, dim] -> [batch, slots, dim]: each slot holds the token sent to it, empty ones zeros."""
    batch, seq, dim = x.shape
    tokens = (torch.arange(seq * top, device=x.device) // top).expand(batch, -1)
    empty = torch.full((batch, slots + 1), seq, dtype=torch.int64, device=x.device)
    source = empty.scatter(1, slot, tokens)[:, :slots]
    filled = x.gather(1, source.clamp(max=seq - 1).unsqueeze(-1).expand(-1, -1, dim))
    return filled * (source < seq).unsqueeze(-1).to(x.dtype)


def to_experts(filled: Tensor, devices: int, group: Any) -> Tensor:
    """[batch, experts of all devices, capacity, dim] -> [batch of all devices, experts here, capacity, dim]."""
    if devices == 1:
        return filled
    parts = torch.cat(filled.chunk(devices, 1))  # what goes to one device is contiguous
    return AllToAll.apply(parts, group)


def to_tokens(made: Tensor, devices: int, group: Any) -> Tensor:
    """The way back of `to_experts`."""
    if devices == 1:
        return made
    parts = AllToAll.apply(made.contiguous(), group)
    return torch.cat(parts.chunk(devices), 1)


class AllToAll(torch.autograd.Function):
    """Part number i of dim 0 goes to rank i of the group; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.group)
        return received, None


TOKENS, EXPERTS = [Shard(0)], [Shard(0)]
exchange = local_map(
    exchange_experts,
    in_placements=(TOKENS, TOKENS, TOKENS, EXPERTS, EXPERTS, EXPERTS, None),
    out_placements=(TOKENS,),
    redistribute_inputs=True,
)
"""Over `ep`: sequences and experts are split; every expert sees the tokens of all devices, so its gradient is whole."""

_S0, _S1, _S2, _R, _P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
ELSEWHERE = [
    {"in": (_S0, _S0, _S0, _R, _R, _R), "out": (_S0,), "in_grad": (_S0, _S0, _S0, _P, _P, _P)},
    {"in": (_R, _R, _R, _S1, _S2, _S1), "out": (_P,), "in_grad": (_P, _R, _P, _S1, _S2, _S1)},
]
"""Over any other axis: sequences split, or the width of every expert."""


class MixtureOfExperts(moe.MixtureOfExperts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, seq, dim] -> the same, and the balance loss."""
        batch, seq, _ = x.shape
        probabilities = self.router(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.top, dim=-1)
        slot, taken, load = self.slots(chosen.view(batch, seq * self.top), probabilities.shape[-1])
        weights = (weights * taken.view(batch, seq, self.top)).to(x.dtype)
        mixed = exchange(x, slot, weights, self.experts.w1, self.experts.w2, self.experts.w3, self.capacity)
        even = (load * probabilities.mean(1)).sum(-1).mean() * probabilities.shape[-1]
        return mixed + self.shared(x), self.balance * even


class Moe(moe.Moe):
    def __init__(self, config: moe.Config) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.moe = MixtureOfExperts(config)
        self.reset_parameters()

    def plan_regions(self) -> dict[str, Any]:
        """What `local_map` cannot say about the region: its axis by name, other legal rows, and what it sends."""
        c = self.config
        sent = float(c.batch * c.experts * c.capacity * c.dim * 2)  # all slots, in bfloat16, there and back
        both = {"all_to_all@ep": 2 * sent}
        return {
            "exchange_experts": {
                "axes": ("ep",),
                "elsewhere": ELSEWHERE,
                "collectives": {"forward": both, "backward": both},
            }
        }


def moe_16b_region(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return moe.build(Moe, moe.MOE_16B, batch, seq, layers, size)


def moe_region_tiny(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return moe.build(Moe, moe.MOE_TINY, batch, seq, layers, size)
