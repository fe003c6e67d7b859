"""Models with functions that a user keeps to himself (`local_map`), right ones and wrong ones; the docstring says which fault."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

Case = tuple[nn.Module, tuple[Any, ...]]


# ---- right ones -----------------------------------------------------------------------------------------------------------
def attend(q: Tensor, k: Tensor, v: Tensor, mesh: Any = None) -> Tensor:
    """[batch, positions here, heads, width] -> the same: all positions of some heads are brought together and sent back."""
    group = None if mesh is None else mesh.get_group("cp")
    q, k, v = (heads_of(x, group) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return positions_of(mixed, group)


def heads_of(x: Tensor, group: Any) -> Tensor:
    """[batch, positions here, heads, width] -> [batch, heads here, positions, width]"""
    if group is None or group.size() == 1:
        return x.transpose(1, 2)
    parts = torch.stack(x.chunk(group.size(), 2))  # [device, batch, positions here, heads of that device, width]
    got = all_to_all_single_autograd(parts.flatten(0, 1), None, None, group).unflatten(0, parts.shape[:2])
    return got.permute(1, 3, 0, 2, 4).flatten(2, 3)


def positions_of(x: Tensor, group: Any) -> Tensor:
    """The way back of `heads_of`."""
    if group is None or group.size() == 1:
        return x.transpose(1, 2)
    parts = torch.stack(x.transpose(1, 2).chunk(group.size(), 1))  # [device, batch, positions of that device, heads here, width]
    got = all_to_all_single_autograd(parts.flatten(0, 1).contiguous(), None, None, group).unflatten(0, parts.shape[:2])
    return got.permute(1, 2, 0, 3, 4).flatten(2, 3)


POSITIONS, ROWS, COPY, SUM = [Shard(1)], [Shard(0)], [Replicate()], [Partial()]
attention = local_map(
    attend, in_placements=(POSITIONS, POSITIONS, POSITIONS), out_placements=(POSITIONS,), redistribute_inputs=True
)


class PositionsExchanged(nn.Module):
    """Attention whose exchange of positions for heads is the user's. Fault: looked into, or counted as planned."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.project = nn.Linear(heads * head_dim, 3 * heads * head_dim, bias=False)
        self.join = nn.Linear(heads * head_dim, heads * head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (-1, self.head_dim)) for part in self.project(x).chunk(3, 2))
        return self.join(attention(q, k, v).flatten(2))

    def plan_regions(self) -> dict[str, Any]:
        batch = Shard(0)
        return {"attend": {"axes": ("cp",), "elsewhere": [{"in": (batch, batch, batch), "out": batch}]}}


def positions_exchanged() -> Case:
    return PositionsExchanged(heads=8, head_dim=4), (torch.randn(8, 16, 32),)


def scores_and_best(x: Tensor, weight: Tensor, offset: float, *, power: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, k], weight [n, k] -> [rows, n], the best column of each row, and the sum over rows [n]."""
    scores = (x @ weight.t()).tanh() ** power + offset
    return scores, scores.argmax(1), scores.sum(0)


scored = local_map(scores_and_best, in_placements=(ROWS, COPY, None), in_grad_placements=(ROWS, SUM, None),
                   out_placements=(ROWS, ROWS, SUM))  # fmt: skip


class SeveralOutputs(nn.Module):
    """Constants, an integer and a pending output, an axis by position. Fault: outputs or gradients swapped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.table = nn.Embedding(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores, best, total = scored(x * self.gain, self.weight, 0.25, power=3)
        return scores * self.table(best) + total


def several_outputs() -> Case:
    return SeveralOutputs(12), (torch.randn(8, 12),)


# ---- wrong ones -----------------------------------------------------------------------------------------------------------
class Wrapped(nn.Module):
    """Calls `region` on a product. Fault: none of its own; the contract of the region is wrong."""

    def __init__(self, region: Any, facts: dict[str, Any] | None = None, *, more: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.region, self.facts, self.more = region, facts, more
        self.dense = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        made = self.region(self.dense(x), *self.more)
        return made[0] if isinstance(made, tuple) else made

    def plan_regions(self) -> Any:
        return {} if self.facts is None else self.facts


def case(region: Any, facts: Any = None, *, more: tuple[Any, ...] = ()) -> Case:
    return Wrapped(region, facts, more=more), (torch.randn(8, 12),)


def double(x: Tensor) -> Tensor:
    return 2 * x


def with_noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def in_place(x: Tensor) -> Tensor:
    x.detach().mul_(2)
    return x + 1


def first_rows(x: Tensor) -> Tensor:
    return x[:4]


def on_every_row(x: Tensor) -> Tensor:
    return x - x.mean(0)


class Holder:
    @staticmethod
    def inside(x: Tensor) -> Tensor:
        return 2 * x


def plain(function: Any, **contract: Any) -> Any:
    return local_map(function, **{"in_placements": (ROWS,), "out_placements": (ROWS,), **contract})


def nameless() -> Case:
    return case(plain(lambda x: 2 * x))


def inside_another() -> Case:
    def hidden(x: Tensor) -> Tensor:
        return 2 * x

    return case(plain(hidden))


def of_a_class() -> Case:
    return case(plain(Holder.inside))


def beyond_its_dims() -> Case:
    return case(plain(double, in_placements=([Shard(2)],)))


def too_many_outputs() -> Case:
    return case(plain(double, out_placements=(ROWS, ROWS)))


def too_few_arguments() -> Case:
    return case(plain(double), more=(1,))


def placed_nowhere() -> Case:
    return case(plain(double, in_placements=None))


def pending_maximum() -> Case:
    return case(plain(double, in_placements=([Partial("max")],)))


def noise_inside() -> Case:
    return case(plain(with_noise))


def writes_its_argument() -> Case:
    return case(plain(in_place))


def unknown_fact() -> Case:
    return case(plain(double), {"double": {"axis": "tp"}})


def unknown_collective() -> Case:
    return case(plain(double), {"double": {"axes": ("tp",), "collectives": {"forward": {"broadcast@tp": 10}}}})


def two_axes_named() -> Case:
    return case(plain(double), {"double": {"axes": ("dp", "tp")}})


@local_map(in_placements=(ROWS,), out_placements=(ROWS,))
def halve(x: Tensor) -> Tensor:
    return x / 2


def decorated() -> Case:
    """Right: the name in the module stands for the wrapped function."""
    return case(halve, {"halve": {"axes": ("tp",), "collectives": {"forward": {"all_gather@tp": 4e9}}}})


def rows_over_tp() -> Case:
    return case(plain(double), {"double": {"axes": ("tp",), "collectives": {}}})


def shape_against_contract() -> Case:
    """Cuts to 4 rows whatever it gets: on pieces these are other rows, and too many."""
    return case(plain(first_rows), {"first_rows": {"axes": ("tp",)}})


def rows_that_depend_on_each_other() -> Case:
    """The contract says that rows are independent, the function subtracts their mean."""
    return case(plain(on_every_row), {"on_every_row": {"axes": ("tp",)}})
