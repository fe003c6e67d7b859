"""Units: sizes are bytes (int), times are microseconds (float), rates are SI per second. GB = 10**9, GiB = 2**30."""

from __future__ import annotations

import re

from planner.errors import InputError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SUFFIXES = {"": 1, "b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TB, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """`80GiB`, `80 GB`, `1e9`, `1073741824` -> bytes.

    Raises:
        InputError: the text is not a non-negative number with one of the suffixes B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _SUFFIXES:
        raise InputError(f"{text!r} is not a size", hint="Write a number with a unit, for example 80GiB (2**30) or 80GB (10**9).")
    return int(float(match[1]) * _SUFFIXES[match[2].lower()])


def format_gib(num_bytes: float) -> str:
    """`1.50 GiB`; what is less than a tenth of one in MiB."""
    return f"{num_bytes / MIB:.2f} MiB" if 0 < abs(num_bytes) < GIB / 10 else f"{num_bytes / GIB:.2f} GiB"


def format_gb(num_bytes: float) -> str:
    """`1.50 GB`; what is less than a tenth of one in MB."""
    return f"{num_bytes / MB:.2f} MB" if 0 < abs(num_bytes) < GB / 10 else f"{num_bytes / GB:.2f} GB"


def format_ms(us: float) -> str:
    return f"{us / 1000:.2f} ms"
