"""Every table of the codecs; native code receives these arrays and holds none of its own."""

import math
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


@cache
def _mass(low: float, high: float) -> float:
    return 0.5 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))


@cache
def _centroid(low: float, high: float) -> float:
    return (_density(low) - _density(high)) / _mass(low, high)


# Arithmetic of the `rotated` codec on integers: docs/format.md, section 4.
INTEGER_LENGTH = 2000
SCALE_UNIT = 2048
BETWEEN_ROUNDS_SHIFT = 4
PEAKED_FACTOR = 16  # 256 over the least kurtosis of a block that has two rounds
COEFFICIENT_MULTIPLIER = 1704
_COEFFICIENT_UNIT = INTEGER_LENGTH * COEFFICIENT_MULTIPLIER / 2**16  # to a standard deviation
# By bits: the positive thresholds, in this unit, of the best quantizer of the unit Gaussian
# (S. Lloyd, "Least squares quantization in PCM", 1982), as a test computes them.
_THRESHOLDS = {1: (), 2: (51,), 3: (26, 55, 91), 4: (13, 27, 42, 57, 75, 96, 125)}
_GREATEST_LEVELS = range(64, 128)
_TABLE_CELLS = 16


@cache
def _merged_cells(bits: int, kept_bits: int) -> list[tuple[float, float]]:
    """Return the positive cells (in standard deviations) of the first ``kept_bits`` planes."""
    edges = [0.0, *(threshold / _COEFFICIENT_UNIT for threshold in _THRESHOLDS[bits])]
    return list(pairwise([*edges[:: 2 ** (bits - kept_bits)], math.inf]))


@cache
def _positive_levels(bits: int, kept_bits: int) -> tuple[int, ...]:
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
    positive = _THRESHOLDS[bits]
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

    For code with a rotated integer r, not its coefficient: the positive cell's number is how many
    ascending thresholds are at most abs(r), for both signs: no multiple of the unit is an integer.
    """
    units = [threshold * 2**16 / COEFFICIENT_MULTIPLIER for threshold in _THRESHOLDS[bits]]
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


DERIVATIVE_PIECES = 16


def derivative_lines(places: Doubles, values: Doubles) -> Doubles:
    """Return the line of least squares on each of 16 pieces of a function.

    ``places`` (n,) ascend, and each counts as the distance between its neighbours. The first and
    last lines are the first and last value, which saturated activations have. Borders minimise the
    error by dynamic programming, among every 64th place first, then among those around these.

    Returns (47,): 15 ascending borders, each a place, then the lines' scales, then their shifts.
    Raises KernelError unless there are at least 64 places for each piece.
    """
    count = len(places)
    if count < 64 * DERIVATIVE_PIECES:
        raise KernelError(
            f"asked for lines through {count} places; give {64 * DERIVATIVE_PIECES} or more"
        )
    sums = _outward_sums(places, values)
    chosen, ends = np.unique(np.append(np.arange(0, count, 64), count)), values[[0, -1]]
    for radius in (64, 8, 0):
        borders = _best_borders(sums, chosen, ends)
        around = borders[:, None] + np.arange(-8, 9) * radius // 8
        chosen = np.unique(np.clip(np.concatenate([[0, count], around.ravel()]), 0, count))
    scale, shift = _lines(np.diff(sums[:, [0, *borders, count]]), ends)
    return np.concatenate([places[borders - 1], scale, shift])


def _outward_sums(x: Doubles, y: Doubles) -> Doubles:
    """Return (6, n + 1) sums of w, wx, wy, wxx, wxy, wyy from the middle, to cancel little."""
    weight, middle = np.gradient(x), len(x) // 2
    sums = np.zeros((6, len(x) + 1))
    ones = np.ones_like(x)
    factors = ((ones, ones), (x, ones), (y, ones), (x, x), (x, y), (y, y))
    for row, (one, other) in zip(sums, factors, strict=True):
        term = weight * (one * other)
        row[:middle] = -term[:middle][::-1].cumsum()[::-1]
        row[middle + 1 :] = term[middle:].cumsum()
    return sums


def _lines(sums: Doubles, ends: Doubles) -> tuple[Doubles, Doubles]:
    """Return scales and shifts of pieces of these (6, pieces) sums, constant at the ``ends``."""
    weight, x, y, xx, xy, _ = sums
    scale = (xy - x * y / weight) / (xx - x * x / weight)
    shift = (y - scale * x) / weight
    scale[[0, -1]], shift[[0, -1]] = 0.0, ends
    return scale, shift


def _best_borders(sums: Doubles, chosen: NDArray[np.intp], ends: Doubles) -> NDArray[np.intp]:
    """Return the best interior borders among the ``chosen`` numbers of places, ends included."""
    here = sums[:, chosen]
    line, total = np.empty((2, len(chosen), len(chosen)))
    for at in range(0, len(chosen), _ROWS):
        line[at : at + _ROWS] = _errors(here, here[:, at : at + _ROWS])
    best, choices = _end_errors(here - here[:, :1], ends[0]), []
    for _ in range(DERIVATIVE_PIECES - 2):
        np.add(best[:, None], line, out=total)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    place = int((best + _end_errors(here[:, -1:] - here, ends[1])).argmin())
    places = [place]
    for choice in reversed(choices):
        place = int(choice[place])
        places.append(place)
    return chosen[places[::-1]]


_ROWS = 32  # at a time: tables are made in mid-training, where memory is short


def _errors(after: Doubles, before: Doubles) -> Doubles:
    """Return the errors of lines on pieces that begin ``before``: (b, a)."""
    weight, x, y, xx, xy, yy = after[:, None, :] - before[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        flat = yy - y * y / weight
        error: Doubles = flat - (xy - x * y / weight) ** 2 / (xx - x * x / weight)
    error[~np.isfinite(error) | (weight <= 0)] = np.inf
    return error


def _end_errors(sums: Doubles, value: float) -> Doubles:
    """Return (n,) errors of the constant ``value`` on pieces of these (6, n) sums."""
    weight, _, y, _, _, yy = sums
    error: Doubles = yy - value * (2.0 * y - value * weight)
    error[weight <= 0] = np.inf
    return error
