"""Convolutions: batch, output channels and input channels are like the letters of a product; windows are never cut.

x [batch, in, *space], weight [out, in / groups, *window], bias [out]. Channels in groups can be split only if every group is one
input channel (depthwise), by whole groups.
"""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import P, R, shard_code

BATCH, CHANNELS = shard_code(0), shard_code(1)
OUT = shard_code(0)
"""Output channels in weight and bias."""


def is_depthwise(groups: int, channels: int) -> bool:
    return groups > 1 and groups == channels


@rule("aten.convolution.default")
def convolution(signature: OpSignature) -> list[Row]:
    """A bias beside a product that is pending must be pending itself: it is added once."""
    x, groups = signature.operands[0], signature.args[8]
    rows: list[Row] = [(R, R, R, R), (BATCH, BATCH, R, R), (P, P, R, P), (P, R, P, P)]
    if groups == 1 and not signature.args[6]:
        rows += [(CHANNELS, R, OUT, OUT), (P, CHANNELS, shard_code(1), P)]
    elif is_depthwise(groups, x.shape[1]) and not signature.args[6]:
        rows.append((CHANNELS, CHANNELS, OUT, OUT))
    return [row[: 1 + len(signature.operands)] for row in rows]


@rule("aten.convolution_backward.default")
def convolution_backward(signature: OpSignature) -> list[Row]:
    """(gradients of x, weight and bias) from (gradient of the output, x, weight)."""
    x, groups, transposed = signature.operands[1], signature.args[9], signature.args[7]
    rows: list[Row] = [(R,) * 6, (BATCH, P, P, BATCH, BATCH, R), (P, P, P, P, R, R)]
    if groups == 1 and not transposed:
        rows += [(P, OUT, OUT, CHANNELS, R, OUT), (CHANNELS, shard_code(1), R, R, CHANNELS, shard_code(1))]
    elif is_depthwise(groups, x.shape[1]) and not transposed:
        rows.append((CHANNELS, OUT, OUT, CHANNELS, CHANNELS, OUT))
    return rows
