"""From values to positions and labels: round ticks, thinned series, labels without overlap."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_POINTS = 480
_LABEL_HEIGHT = 0.055  # share of a chart's height

Point = tuple[float, float]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return about ``wanted`` round values within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(each * unit for each in _ROUND if each * unit >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Return a value in at most four significant digits, with thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thinned(
    points: Sequence[Point], summary: Callable[[Sequence[float]], float], most: int = _MOST_POINTS
) -> list[Point]:
    """Return at most ``most`` points; neighbours merge into (last x, ``summary`` of their y)."""
    if len(points) <= most:
        return list(points)
    edges = [round(index * len(points) / most) for index in range(most + 1)]
    groups = [points[start:end] for start, end in pairwise(edges)]
    return [(group[-1][0], summary([y for _, y in group])) for group in groups]


def spread(heights: Sequence[float], top: float) -> list[float]:
    """Return label positions for rising ``heights``; those that would overlap spread evenly."""
    gap = _LABEL_HEIGHT * top
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _places(groups[-1], gap)[0] < _places(groups[-2], gap)[-1] + gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [place for group in groups for place in _places(group, gap)]


def _places(group: Sequence[float], gap: float) -> list[float]:
    lowest = sum(group) / len(group) - gap * (len(group) - 1) / 2
    return [lowest + gap * i for i in range(len(group))]
