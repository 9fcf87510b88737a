"""Least squares with unknowns that are not negative: pure NumPy.

SciPy has it too, but importing its optimizers leaves 36 MB in the training process for good.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ROUNDING = 1e-12  # of the largest; what is below 0 by less is taken to be 0
_FULL_EXCHANGES = 3
_MOST_ROUNDS = 200


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """(unknowns,) x >= 0 of least ‖matrix x - target‖².

    Block principal pivoting (Kim and Park, SIAM Journal on Scientific Computing 2011, section 3):
    every unknown is either free or 0; those that break its conditions change
    sides, all at once, or the last one alone where that has stopped making progress.

    Args:
        matrix: (rows, unknowns), of full column rank.
        target: (rows,).
    """
    gram, product = matrix.T @ matrix, matrix.T @ target
    free = np.zeros(len(product), dtype=np.bool_)
    fewest, exchanges = len(product) + 1, _FULL_EXCHANGES
    for _ in range(_MOST_ROUNDS):
        values = _with_free(gram, product, free)
        broken = _broken(gram, product, values, free)
        if not broken.any():
            break
        if broken.sum() < fewest:
            fewest, exchanges = int(broken.sum()), _FULL_EXCHANGES
        elif exchanges:
            exchanges -= 1
        else:
            broken[: np.flatnonzero(broken)[-1]] = False
        free ^= broken
    return np.maximum(values, 0.0)


def _with_free(gram: Floats, product: Floats, free: NDArray[np.bool_]) -> Floats:
    values = np.zeros_like(product)
    if free.any():
        values[free] = np.linalg.solve(gram[np.ix_(free, free)], product[free])
    return values


def _broken(
    gram: Floats, product: Floats, values: Floats, free: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Free unknowns below 0, and others that the fit would rather have above it."""
    slope = gram @ values - product
    below = values < -_ROUNDING * np.abs(values).max(initial=0.0)
    wanted = slope < -_ROUNDING * np.abs(product).max(initial=0.0)
    broken: NDArray[np.bool_] = np.where(free, below, wanted)
    return broken
