"""Every table of the codecs; native code receives these arrays and holds none of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import KernelError

Bytes = NDArray[np.int8]
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
    """Return thresholds and levels of the best ``2**bits``-level quantizer of the unit Gaussian.

    The positive halves, ascending: ``2**(bits-1) - 1`` thresholds and ``2**(bits-1)`` levels.
    Iterates Lloyd's conditions (levels are centroids, thresholds midpoints): S. Lloyd, "Least
    squares quantization in PCM", 1982.
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


# Arithmetic of the `rotated` codec on integers: docs/format.md, section 4.
INTEGER_LENGTH = 2000
SCALE_UNIT = 2048
BETWEEN_ROUNDS_SHIFT = 4
PEAKED_FACTOR = 16  # 256 over the least kurtosis of a block that has two rounds
COEFFICIENT_MULTIPLIER = 1704
_COEFFICIENT_UNIT = INTEGER_LENGTH * COEFFICIENT_MULTIPLIER / 2**16  # to a standard deviation
_GREATEST_LEVELS = range(64, 128)
_TABLE_CELLS = 16


@cache
def _integer_thresholds(bits: int) -> tuple[int, ...]:
    """Return positive thresholds of coefficients without their lower bits."""
    return tuple(round(_COEFFICIENT_UNIT * threshold) for threshold in lloyd_max(bits)[0])


def _merged_cells(bits: int, kept_bits: int) -> list[tuple[float, float]]:
    """Return the positive cells (in standard deviations) of the first ``kept_bits`` planes."""
    edges = [0.0, *(threshold / _COEFFICIENT_UNIT for threshold in _integer_thresholds(bits))]
    return list(pairwise([*edges[:: 2 ** (bits - kept_bits)], math.inf]))


@cache
def _positive_levels(bits: int, kept_bits: int) -> tuple[int, ...]:
    """Return the merged cells' centroids, on the integer grid of least error."""
    centroids = [_centroid(*cell) for cell in _merged_cells(bits, kept_bits)]
    candidates = [
        tuple(round(greatest * value / centroids[-1]) for value in centroids)
        for greatest in _GREATEST_LEVELS
    ]
    # Rounded, the finest among equals, so that the last digits of a machine's exp decide nothing.
    return min(
        reversed(candidates), key=lambda levels: round(_relative_error(bits, kept_bits, levels), 12)
    )


def _relative_error(bits: int, kept_bits: int, levels: tuple[int, ...]) -> float:
    """E[level²] / E[x level]² − 1 of a unit Gaussian x."""
    masses = [2 * _mass(*cell) for cell in _merged_cells(bits, kept_bits)]
    energy = sum(mass * level**2 for mass, level in zip(masses, levels, strict=True))
    return energy / _gain(bits, kept_bits, levels) ** 2 - 1.0


def _gain(bits: int, kept_bits: int, levels: tuple[int, ...]) -> float:
    """E[x level] of a unit Gaussian x: the divisor of the header's scale."""
    cells = _merged_cells(bits, kept_bits)
    return sum(
        2 * level * _mass(*cell) * _centroid(*cell)
        for cell, level in zip(cells, levels, strict=True)
    )


@cache
def rotated_thresholds(bits: int) -> Bytes:
    """Return (bits, 16) read-only int8 thresholds of the ``bits``-bit ``rotated`` code.

    Row s decides bit ``3 - s`` of a cell, the code with its first bit at weight 8. Entry c applies
    to coefficients whose first s bits make the cell c; those strictly above it set the bit. Row 0
    is constant; entries of cells that no code has are 0.
    """
    positive = _integer_thresholds(bits)
    ascending = [-value for value in reversed(positive)] + [0, *positive]
    table = np.zeros((bits, _TABLE_CELLS), np.int8)
    for step in range(bits):
        width = 2 ** (bits - step)
        for prefix in range(2**step):
            # Coefficients are rounded down, so "not below t" is "above t - 1".
            table[step, prefix << (4 - step)] = ascending[prefix * width + width // 2 - 1] - 1
    table[0] = table[0, 0]
    return _frozen(table)


@cache
def rotated_magnitudes(bits: int) -> Floats:
    """Return (16,) read-only float32: thresholds of magnitudes, then from the eighth their levels.

    For code that has a rotated integer r rather than its coefficient: the positive cell's number is
    how many thresholds, ascending, are at most abs(r). No multiple of the unit is an integer, so
    both signs have the same.
    """
    units = [threshold * 2**16 / COEFFICIENT_MULTIPLIER for threshold in _integer_thresholds(bits)]
    table = np.zeros(16, np.float32)
    table[: len(units)] = np.ceil(units)
    levels = _positive_levels(bits, bits)
    table[8 : 8 + len(levels)] = levels
    table.setflags(write=False)
    return table


@cache
def rotated_levels(bits: int, kept_bits: int) -> Bytes:
    """Return (16,) read-only int8 levels of the first ``kept_bits`` of ``bits`` planes, by cell.

    A cell is the kept bits, the first at weight 8. Levels are centroids of the unit Gaussian's
    merged cells as integers, at most 127.
    """
    positive = _positive_levels(bits, kept_bits)
    ascending = [-level for level in reversed(positive)] + list(positive)
    table = np.zeros(_TABLE_CELLS, np.int8)
    table[:: 2 ** (4 - kept_bits)] = ascending
    return _frozen(table)


@cache
def rotated_level_factor(bits: int, kept_bits: int) -> float:
    """Return a level's worth in units of the header's scale (of all planes), exactly a float32."""
    whole = _gain(bits, bits, _positive_levels(bits, bits))
    kept = _gain(bits, kept_bits, _positive_levels(bits, kept_bits))
    return float(np.float32(whole / kept / SCALE_UNIT))  # the ratio keeps fewer planes unbiased


@cache
def rotated_error(bits: int, kept_bits: int) -> float:
    """Return ``rotated``'s relative mean-square error from its first ``kept_bits`` planes."""
    return _relative_error(bits, kept_bits, _positive_levels(bits, kept_bits))


def _frozen(array: Bytes) -> Bytes:
    array.setflags(write=False)
    return array


def derivative_table(
    activation: Callable[[Doubles], Doubles], bits: int, low: float = -100.0, high: float = 100.0
) -> tuple[Floats, Floats]:
    """Return the best piecewise-constant derivative of ``activation`` on ``2**bits`` intervals.

    Least squares, uniform weight on [low, high] (Novikov et al., "Few-bit backward", ICML 2023). An
    interval's best level is the mean derivative ``(h(b) - h(a)) / (b - a)``, so the best borders
    maximise the sum of ``(h(b) - h(a))**2 / (b - a)``: dynamic programming over a grid, repeated on
    finer grids around the borders found.

    ``activation``: h itself, elementwise on float64 arrays. Returns (2**bits - 1,) float32 borders,
    ascending, and (2**bits,) float32 levels. Raises KernelError unless ``bits`` is 1 to 4 and the
    range not empty.
    """
    if bits not in range(1, 5) or not low < high:
        raise KernelError(
            f"asked for a {bits}-bit derivative code on [{low}, {high}]; "
            "tables exist for 1 to 4 bits on a range that is not empty"
        )
    # Symmetric, and a thousand times denser in the middle than at the ends.
    bent = np.sinh(7.6 * np.linspace(-1.0, 1.0, 801)) / math.sinh(7.6)
    grid = 0.5 * (low + high) + 0.5 * (high - low) * bent
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


def _best_borders(
    activation: Callable[[Doubles], Doubles], grid: Doubles, intervals: int
) -> Doubles:
    """Return the best fit's interior borders from ``grid``; holds two matrices of 5 MB at once."""
    gain = np.subtract.outer(activation(grid), activation(grid)).T
    total = np.subtract.outer(grid, grid).T  # the width of a piece from i to j
    with np.errstate(divide="ignore", invalid="ignore"):
        np.divide(np.square(gain, out=gain), total, out=gain)
    gain[total <= 0] = -np.inf  # gain[i, j]: one piece from i to j
    best, choices = gain[0], []
    for _ in range(intervals - 1):
        np.add(best[:, None], gain, out=total)
        choices.append(total.argmax(axis=0))
        best = total.max(axis=0)
    place, places = len(grid) - 1, []
    for choice in reversed(choices):
        place = int(choice[place])
        places.append(place)
    return grid[places[::-1]]
