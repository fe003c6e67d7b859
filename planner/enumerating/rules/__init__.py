"""Our own one-axis rules, one module per family. DTensor's rows are used for every op not listed here."""

from planner.enumerating.rules import (
    attention,
    convolution,
    experts,
    factory,
    indexing,
    joining,
    matmul,
    pointwise,
    pooling,
    reductions,
    region,
    rowwise,
)

__all__ = [
    "attention",
    "convolution",
    "experts",
    "factory",
    "indexing",
    "joining",
    "matmul",
    "pointwise",
    "pooling",
    "reductions",
    "region",
    "rowwise",
]
