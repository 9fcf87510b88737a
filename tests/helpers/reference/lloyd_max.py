"""The best quantizer of the unit Gaussian, from which the codecs' thresholds were computed."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise


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
    return [0.0, *(0.5 * (low + high) for low, high in pairwise(levels)), math.inf]


def _centroid(low: float, high: float) -> float:
    return (_density(low) - _density(high)) / _mass(low, high)


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _mass(low: float, high: float) -> float:
    return 0.5 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))
