"""`planner::einsum`: a product of two tensors as ONE op, in forward and in both gradients.

A plain `F.linear` on [batch, seq, k] is traced as view, mm, view; the flattened view could no longer be split along the
sequence. As `bsk,nk->bsn` every letter stays a dim that can be sharded. Importing this file registers the op with torch.
"""

from __future__ import annotations

import string
from typing import Any

import torch
from torch import Tensor

BATCH_LETTERS = "bstuvw"


@torch.library.custom_op("planner::einsum", mutates_args=())
def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum(equation, a, b).contiguous()


@einsum.register_fake
def _shape(equation: str, a: Tensor, b: Tensor) -> Tensor:
    left, out = equation.split("->")
    sizes: dict[str, int] = {}
    for term, tensor in zip(left.split(","), (a, b), strict=True):
        fits = len(term) == tensor.dim() and all(
            sizes.setdefault(*pair) == pair[1] for pair in zip(term, tensor.shape, strict=True)
        )
        if not fits:
            raise RuntimeError(f"product {equation}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit")
    if a.dtype != b.dtype:
        raise RuntimeError(f"product {equation}: dtypes {a.dtype} and {b.dtype} differ")
    return a.new_empty([sizes[letter] for letter in out])


def _save(ctx: Any, inputs: tuple[str, Tensor, Tensor], output: Tensor) -> None:
    ctx.equation = inputs[0]
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    left, out = ctx.equation.split("->")
    a, b = left.split(",")
    first, second = ctx.saved_tensors
    to_first = einsum(f"{out},{b}->{a}", gradient, second) if ctx.needs_input_grad[1] else None
    to_second = einsum(f"{out},{a}->{b}", gradient, first) if ctx.needs_input_grad[2] else None
    return None, to_first, to_second


einsum.register_autograd(_backward, setup_context=_save)


def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The op as a plain function, to stand in a captured graph."""
    return einsum(equation, a, b)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with its argument names: input [*batch, k], weight [n, k] -> [*batch, n]."""
    batch = BATCH_LETTERS[: input.dim() - 1]
    product = einsum(f"{batch}k,nk->{batch}n", input, weight)
    return product if bias is None else product + bias


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for shapes that `matmul_fits` accepts."""
    batch = BATCH_LETTERS[: a.dim() - (1 if b.dim() <= 2 else 2)]
    if b.dim() == 1:
        return einsum(f"{batch}k,k->{batch}", a, b)
    if b.dim() == 2:
        return einsum(f"{batch}k,kn->{batch}n", a, b)
    return einsum(f"{batch}mk,{batch}kn->{batch}mn", a, b)


def matmul_fits(a: Tensor, b: Tensor) -> bool:
    """[*batch, k] @ [k, n] or @ [k], or both with the same leading dims: no broadcasting, so one equation says it all."""
    if b.dim() <= 2:
        return b.dim() <= a.dim() <= len(BATCH_LETTERS) + 1 and b.dim() > 0
    return 3 <= b.dim() == a.dim() <= len(BATCH_LETTERS) + 2 and a.shape[:-2] == b.shape[:-2]


def equation_fits(equation: str, count: int) -> bool:
    """A user's `torch.einsum` of two tensors that this op and its gradients can express."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if count != 2 or len(terms) != 2 or not arrow:
        return False
    a, b = terms
    plain = all(set(t) <= set(string.ascii_letters) and len(set(t)) == len(t) for t in (a, b, out))
    return plain and set(a) <= set(b + out) and set(b) <= set(a + out) and set(out) <= set(a + b)
