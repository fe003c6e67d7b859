"""Helpers that exported files carry, run on numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from planner.exporting.script import template

Helpers = dict[str, Any]


@pytest.fixture(scope="module")
def helpers() -> Helpers:
    """Those of products by expert."""
    text = re.sub(r"^@@\w+@@\n", "", template("op_helpers"), flags=re.M)
    names: Helpers = {"torch": torch}
    exec(compile(text[text.index("def expert_rows") : text.index("def masked_embedding(")], "op_helpers", "exec"), names)
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "choices", "k", "n", "experts"), [(5, 2, 6, 3, 4), (8, 2, 8, 16, 4), (3, 1, 1, 1, 3)])
def test_products_by_expert_of_any_width(
    helpers: Helpers, dtype: torch.dtype, tokens: int, choices: int, k: int, n: int, experts: int
) -> None:
    """Widths that are no whole 16 bytes too, as pieces of small models have them."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(tokens, choices, width, generator=generator).to(dtype) for width in (k, n))
    weight = torch.randn(experts, n, k, generator=generator).to(dtype)
    index = torch.randint(experts, (tokens, choices), generator=generator)
    chosen = weight[index].float()
    close = {"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    product = helpers["product_by_expert"]
    torch.testing.assert_close(product(x, weight, index).float(), torch.einsum("tck,tcnk->tcn", x.float(), chosen), **close)
    torch.testing.assert_close(product(g, weight, index, True).float(), torch.einsum("tcn,tcnk->tck", g.float(), chosen), **close)
    wanted = torch.zeros(experts, n, k)
    wanted.index_put_((index,), torch.einsum("tcn,tck->tcnk", g.float(), x.float()), accumulate=True)
    got = helpers["weight_grad_by_expert"](g, x, index, experts)
    torch.testing.assert_close(got.float(), wanted, **close)
    assert got.is_contiguous()
