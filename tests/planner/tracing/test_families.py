"""Models named with their sizes: `decoder[dim=64,heads=4]`."""

import pytest
import torch

from planner.errors import UnknownModelError
from planner.tracing.sources import find_factory


def parameters(name: str) -> int:
    module, _ = find_factory(name)(layers=2, batch=2, seq=8)
    return sum(p.numel() for p in module.parameters())


def test_sizes_in_the_name_are_those_of_the_model() -> None:
    """By hand: embedding and head, per layer four attention matrices, three or two of the MLP and two norms, a last norm."""
    gated = "decoder[dim=64,heads=4,kv_heads=2,ffn=96,vocab=100]"
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    assert parameters(gated) == 2 * 100 * 64 + 2 * layer + 64
    plain = "decoder[dim=64,heads=4,kv_heads=4,ffn=96,vocab=100,gated=0,tied=1,biases=1,norm=layer,positions=learned]"
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 96 + 96 + 64 + 2 * 2 * 64
    assert parameters(plain) == 100 * 64 + 8 * 64 + 2 * layer + 2 * 64


@pytest.mark.parametrize(
    "flags", ["gated=1,norm=rms", "gated=0,norm=layer,positions=learned,tied=1", "kv_heads=2,positions=none"]
)
def test_every_family_trains(flags: str) -> None:
    module, args = find_factory(f"decoder[dim=64,heads=4,ffn=96,vocab=100,{flags}]")(size="tiny")
    tokens, labels = (torch.randint(0, 100, arg.shape) for arg in args)
    loss = module(tokens, labels)
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    "name", ["decoder[colour=3]", "decoder[dim]", "decoder[dim=64", "decoder[batch=2]", "decoder", "llama3-8b[dim=64]"]
)
def test_sizes_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(UnknownModelError):
        find_factory(name)
