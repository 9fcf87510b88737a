"""The oracle of a normalisation of rows: section 11 of ``docs/format.md``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daf.kernels import ROWS_PER_SPAN
from reference.blocks import Affine
from reference.elements import Floats, canonical
from reference.reductions import LANES, Doubles, halve


class RowGradients(NamedTuple):
    """Gradients of the input, (count,) float32; of beta and gamma, (length,) float64 each."""

    x: Floats
    beta: Doubles
    gamma: Doubles


@np.errstate(all="ignore")
def row_affine(x: Floats, length: int, epsilon: float, *, centred: bool) -> Affine:
    """Return the affine that normalises (count,) float32 elements in rows of ``length``."""
    wide = x.reshape(-1, length).astype(np.float64)
    square = _row_sums(wide * wide) / length
    if not centred:
        inverse = 1.0 / np.sqrt(square + epsilon)
        return Affine(canonical(inverse), np.zeros(len(wide), np.float32), length)
    mean = _row_sums(wide) / length
    variance = square - mean * mean
    variance = np.where(variance < 0, 0.0, variance)  # NaN stays
    inverse = 1.0 / np.sqrt(variance + epsilon)
    return Affine(canonical(inverse), canonical(-(mean * inverse)), length)


@np.errstate(all="ignore")
def row_gradients(
    values: Floats, gradient: Floats, scale: Floats, gamma: Floats | None, *, centred: bool
) -> RowGradients:
    """Run backward from normalised values (count,); ``scale`` (rows,) by :func:`row_affine`."""
    rows = len(scale)
    v, d = values.reshape(rows, -1), gradient.reshape(rows, -1)
    length = v.shape[1]
    g = d if gamma is None else d * gamma
    r = scale.astype(np.float64)
    of_value = -(r * (_row_sums(g * v).astype(np.float64) / length))
    offset = -(r * (_row_sums(g).astype(np.float64) / length)) if centred else np.zeros(rows)
    a, b = of_value.astype(np.float32)[:, None], offset.astype(np.float32)[:, None]
    x = canonical(g * scale[:, None] + (v * a + b)).reshape(-1)
    return RowGradients(x, _column_sums(d), _column_sums(d * v))


def _row_sums(elements: NDArray[Any]) -> NDArray[Any]:
    """Sum (rows, length) to (rows,): sixteen lanes, then halving strides; all of one dtype."""
    rows, length = elements.shape
    lanes = np.zeros((LANES, rows), elements.dtype)
    for place in range(length):
        lanes[place % LANES] += elements[:, place]
    return halve(lanes)


def _column_sums(elements: Floats) -> Doubles:
    """Sum (rows, length) to (length,): spans row after row in float32, then spans in float64."""
    total = np.zeros(elements.shape[1])
    for first in range(0, len(elements), ROWS_PER_SPAN):
        span = np.zeros(elements.shape[1], np.float32)
        for row in elements[first : first + ROWS_PER_SPAN]:
            span += row
        total += span
    return np.where(np.isnan(total), np.nan, total)
