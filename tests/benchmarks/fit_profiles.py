"""Fit the fitted constants of the hardware profiles from a folder of public measurements; print them as TOML.

    python -m tests.benchmarks.fit_profiles FOLDER [gemm|attention|pointwise|nodes|fabrics|clocks|host ...]

Every `residual_pct` is the mean absolute error on rows left out of the fit, split by shape family (kernels) or by source
(collectives), never by row, unless `range` says otherwise; lines that begin with # print it. Nothing in `planner/` reads the
folder. Not run by the test suite. Of training steps one number per machine is fitted (`clocks`), of rankings and memory none:
`python -m planner accuracy FOLDER` scores them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from planner.hardware import load_profile
from tests.benchmarks.fit_clock import fit_clocks
from tests.benchmarks.fit_collectives import FAMILIES, fit_fabric, fit_node
from tests.benchmarks.fit_gemm import fit_fp8, fit_gemm
from tests.benchmarks.fit_host import fit_host
from tests.benchmarks.fit_kernels import fit_attention, fit_pointwise

GPUS = ("H100-SXM-80GB", "H200-SXM", "A100-SXM-80GB", "B200-SXM")


def fit_nodes(folder: Path) -> None:
    for gpu in GPUS:
        fit_node(folder, gpu)


def fit_fabrics(folder: Path) -> None:
    for family in FAMILIES:
        efficiency = load_profile(f"h100_sxm+{family}").fabric.efficiency
        fit_fabric(folder, family, dict(efficiency))


FITS: Mapping[str, Callable[[Path], None]] = {
    "gemm": fit_gemm, "attention": fit_attention, "pointwise": fit_pointwise, "nodes": fit_nodes, "fabrics": fit_fabrics,
    "clocks": fit_clocks, "fp8": fit_fp8, "host": fit_host,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("fits", nargs="*", choices=list(FITS), default=list(FITS))
    args = parser.parse_args()
    for name in args.fits:
        FITS[name](args.folder)


if __name__ == "__main__":
    main()
