"""From values to places and labels: round ticks, and series thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_POINTS = 480

Point = tuple[float, float]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values within [low, high], about ``wanted`` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(each * unit for each in _ROUND if each * unit >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """A value in at most four significant digits, with thousands set off by commas."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thinned(
    points: Sequence[Point], summary: Callable[[Sequence[float]], float], most: int = _MOST_POINTS
) -> list[Point]:
    """At most ``most`` points: neighbours become one at their last x and ``summary`` of their y.

    Memory takes ``max``, so that no peak is lost; losses take their mean.
    """
    if len(points) <= most:
        return list(points)
    edges = [round(index * len(points) / most) for index in range(most + 1)]
    groups = [points[start:end] for start, end in pairwise(edges)]
    return [(group[-1][0], summary([y for _, y in group])) for group in groups]
