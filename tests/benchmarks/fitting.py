"""Common parts of the fits: folds by source, interpolation weights, robust least squares, constants as TOML."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable

import numpy as np
import pandas as pd


def emit(
    key: str, value: object, unit: str, source: str, *, residual: float | None = None, rows: int = 0, extent: str = ""
) -> None:
    """Print one constant as a TOML table: fitted with its residual in %, else a choice of the fit (`guess`)."""
    kind = "guess" if residual is None else "fitted"
    print(f'[{key}]\nvalue = {json.dumps(value)}\nunit = {json.dumps(unit)}\nkind = "{kind}"')
    print(f"source = {json.dumps(source, ensure_ascii=False)}\ndate = {json.dumps(str(datetime.date.today()))}")
    if residual is not None:
        print(f"residual_pct = {residual:.1f}\nrows = {rows}\nrange = {json.dumps(extent, ensure_ascii=False)}")
    print()


def hats(x: np.ndarray, knots: list[float]) -> np.ndarray:
    """[rows, knots] weights of linear interpolation in log x, flat outside."""
    logs = np.log(knots)
    return np.stack([np.interp(np.log(x), logs, row) for row in np.eye(len(knots))], 1)


def bends(shape: tuple[int, ...]) -> np.ndarray:
    """[triples, cells] second differences along every axis of a table."""
    cells = np.arange(np.prod(shape)).reshape(shape)
    rows = []
    for axis in range(len(shape)):
        lines = np.moveaxis(cells, axis, -1).reshape(-1, shape[axis])
        for line in lines:
            for triple in zip(line, line[1:], line[2:], strict=False):
                row = np.zeros(cells.size)
                row[list(triple)] = 1, -2, 1
                rows.append(row)
    return np.array(rows)


def least_squares(design: np.ndarray, target: np.ndarray, penalty: np.ndarray | None = None) -> np.ndarray:
    """Least squares, then twice reweighted towards least absolute error. `penalty` [rows, unknowns] is added to the loss."""
    weight = np.ones(len(target))
    found = np.zeros(design.shape[1])
    for _ in range(3):
        weighted = design * weight[:, None] ** 2
        square = weighted.T @ design + (0 if penalty is None else penalty.T @ penalty)
        found = np.linalg.lstsq(square, weighted.T @ target, rcond=None)[0]
        weight = 1 / np.sqrt(np.maximum(np.abs(design @ found - target), 0.02))
    return found


def gauss_newton(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray, steps: int = 40) -> np.ndarray:
    """Damped Gauss-Newton, reweighted towards least absolute residuals; ends where no step helps."""
    found, damping = start, 1e-2
    now = residuals(found)
    for _ in range(steps):
        weight = 1 / np.maximum(np.abs(now), 0.02)
        slopes = np.stack([(residuals(found + 1e-5 * row) - now) / 1e-5 for row in np.eye(len(found))], 1)
        square, pull = slopes.T @ (slopes * weight[:, None]), slopes.T @ (weight * now)
        for _ in range(8):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -pull).clip(-0.5, 0.5)
            then = residuals(found + step)
            if np.abs(then).mean() < np.abs(now).mean():
                found, now, damping = found + step, then, damping / 3
                break
            damping *= 4
        else:
            break
    return found


def simplex(loss: Callable[[np.ndarray], float], start: np.ndarray, steps: int) -> np.ndarray:
    """Nelder-Mead, enough for four parameters."""
    points = [start] + [start * (1 + 0.1 * row) for row in np.eye(len(start))]
    ranked = sorted((loss(p), tuple(p)) for p in points)
    for _ in range(steps):
        best, worst = np.array(ranked[0][1]), np.array(ranked[-1][1])
        middle = np.mean([p for _, p in ranked[:-1]], axis=0)
        for factor in (2.0, 1.0, -0.5):
            moved = middle + factor * (middle - worst)
            if loss(moved) < ranked[-2][0]:
                ranked[-1] = (loss(moved), tuple(moved))
                break
        else:
            ranked = [(loss(q), tuple(q)) for q in (best + 0.5 * (np.array(p) - best) for _, p in ranked)]
        ranked.sort()
    return np.array(ranked[0][1])


def left_out(folds: np.ndarray, fit: Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]], truth: np.ndarray) -> np.ndarray:
    """|predicted / measured - 1| of every row, predicted by a fit on the other folds."""
    error = np.zeros(len(truth))
    for fold in np.unique(folds):
        inside = folds == fold
        error[inside] = np.abs(fit(~inside)(inside) / truth[inside] - 1)
    return error


def family_folds(*columns: pd.Series) -> np.ndarray:
    """Five folds; equal values of all columns lie in one."""
    family = pd.factorize(pd.Series(list(zip(*columns, strict=True))))[0]
    return np.random.default_rng(0).integers(0, 5, family.max() + 1)[family]
