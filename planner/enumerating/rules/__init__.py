"""Our own one-axis rules, one module per family. DTensor's rows are used for every op not listed here."""

from planner.enumerating.rules import attention, factory, indexing, joining, matmul, reductions

__all__ = ["attention", "factory", "indexing", "joining", "matmul", "reductions"]
