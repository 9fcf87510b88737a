"""The one home of every table: native code is handed these arrays, it holds none of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from daf.errors import KernelError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _mass(low: float, high: float) -> float:
    return 0.5 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))


def _centroid(low: float, high: float) -> float:
    return (_density(low) - _density(high)) / _mass(low, high)


@cache
def lloyd_max(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Positive half of the best ``2**bits``-level quantizer of the unit Gaussian.

    Lloyd's conditions (levels are centroids, thresholds are midpoints), iterated
    until they stand still: S. Lloyd, "Least squares quantization in PCM", 1982.

    Returns:
        The positive thresholds (``2**(bits-1) - 1``) and positive levels
        (``2**(bits-1)``), ascending; the negative ones mirror them.
    """
    half = 2 ** (bits - 1)
    levels = [(index + 0.5) * 3.0 / half for index in range(half)]
    while True:
        edges = _edges(levels)
        updated = [_centroid(low, high) for low, high in pairwise(edges)]
        change = max(abs(new - old) for new, old in zip(updated, levels, strict=True))
        levels = updated
        if change < 1e-14:
            return tuple(_edges(levels)[1:-1]), tuple(levels)


def _edges(levels: list[float]) -> list[float]:
    middles = [0.5 * (low + high) for low, high in pairwise(levels)]
    return [0.0, *middles, math.inf]


@cache
def rotated_thresholds(bits: int) -> Floats:
    """(2**(bits-1) - 1,) positive thresholds of the ``bits``-bit ``rotated`` code; read-only."""
    return _frozen(np.array(lloyd_max(bits)[0], np.float32))


@cache
def rotated_levels(bits: int, kept_bits: int) -> Floats:
    """(2**kept_bits,) decoded values of the first ``kept_bits`` planes of a ``bits``-bit code.

    Centroids of the merged cells divided by ``1 - D``, D being the mean-square
    error of decoding to these centroids, so that the header's scale, computed
    for all planes, leaves the result unbiased. Ascending; read-only.
    """
    cells = _merged_cells(bits, kept_bits)
    centroids = [_centroid(low, high) for low, high in cells]
    explained = sum(
        2 * _mass(*cell) * value**2 for cell, value in zip(cells, centroids, strict=True)
    )
    positive = np.array([value / explained for value in centroids])
    return _frozen(np.concatenate([-positive[::-1], positive]).astype(np.float32))


def _merged_cells(bits: int, kept_bits: int) -> list[tuple[float, float]]:
    """Positive cells of a ``bits``-bit code that its first ``kept_bits`` planes tell apart."""
    edges = [0.0, *lloyd_max(bits)[0]]
    return list(pairwise([*edges[:: 2 ** (bits - kept_bits)], math.inf]))


def rotated_error(bits: int, kept_bits: int) -> float:
    """Expected relative mean-square error of ``rotated``: D/(1 - D) with D as above."""
    levels = rotated_levels(bits, kept_bits).astype(np.float64)
    masses = [_mass(low, high) for low, high in _merged_cells(bits, kept_bits)]
    energy = 2 * float(np.dot(masses, levels[len(masses) :] ** 2))
    return energy - 1.0


def _frozen(array: Floats) -> Floats:
    array.setflags(write=False)
    return array


def derivative_table(
    activation: Callable[[Doubles], Doubles],
    bits: int,
    low: float = -100.0,
    high: float = 100.0,
) -> tuple[Floats, Floats]:
    """Best piecewise-constant derivative of ``activation`` on ``2**bits`` intervals.

    Least squares with uniform weight on [low, high] (Novikov et al., "Few-bit
    backward", ICML 2023). An interval's best level is the mean derivative,
    ``(h(b) - h(a)) / (b - a)``, so the best borders maximise the sum of
    ``(h(b) - h(a))**2 / (b - a)``: dynamic programming over a grid, repeated on
    finer grids around the borders found.

    Args:
        activation: h itself, elementwise on float64 arrays (not its derivative).
        bits: 1 to 4.
        low: left end of the weighted range.
        high: right end of the weighted range.

    Returns:
        (2**bits - 1,) float32 borders, ascending, and (2**bits,) float32 levels.

    Raises:
        KernelError: bits outside 1 to 4, or an empty range.
    """
    if bits not in range(1, 5) or not low < high:
        raise KernelError(
            f"asked for a {bits}-bit derivative code on [{low}, {high}]; "
            "tables exist for 1 to 4 bits on a range that is not empty"
        )
    grid = 0.5 * (low + high) + 0.5 * (high - low) * _dense_in_the_middle(801)
    borders = _best_borders(activation, grid, 2**bits)
    radius = 2 * np.diff(grid)[np.searchsorted(grid, borders)]
    for _ in range(24):
        around = borders[:, None] + radius[:, None] * np.linspace(-1.0, 1.0, 17)
        grid = np.unique(np.clip(np.concatenate([[low, high], around.ravel()]), low, high))
        borders = _best_borders(activation, grid, 2**bits)
        radius = radius / 2
    ends = np.concatenate([[low], borders, [high]])
    levels = np.diff(activation(ends)) / np.diff(ends)
    return borders.astype(np.float32), levels.astype(np.float32)


def _dense_in_the_middle(points: int) -> Doubles:
    """Odd-symmetric points on [-1, 1], a thousand times denser at 0 than at the ends."""
    unit = np.linspace(-1.0, 1.0, points)
    bent: Doubles = np.sinh(7.6 * unit) / math.sinh(7.6)
    return bent


def _best_borders(
    activation: Callable[[Doubles], Doubles], grid: Doubles, intervals: int
) -> Doubles:
    """Interior borders, chosen from ``grid``, of the best fit with ``intervals`` pieces."""
    rise = np.subtract.outer(activation(grid), activation(grid)).T
    width = np.subtract.outer(grid, grid).T
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(width > 0, rise**2 / width, -np.inf)  # gain[i, j]: one piece from i to j
    best, choices = gain[0], []
    for _ in range(intervals - 1):
        total = best[:, None] + gain
        choices.append(total.argmax(axis=0))
        best = total.max(axis=0)
    place, places = len(grid) - 1, []
    for choice in reversed(choices):
        place = int(choice[place])
        places.append(place)
    return grid[places[::-1]]
