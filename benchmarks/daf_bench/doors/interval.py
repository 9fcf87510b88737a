"""Intervals of 95 %: of a median over pairs, from ranks alone, and of a mean by Student's t.

Step times follow no known law, so theirs are medians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

LEAST_PAIRS = 12
CONFIDENCE = 0.95
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # by degrees of freedom


@dataclass(frozen=True, slots=True)
class Interval:
    """A middle and the two values between which it lies, 19 times of 20."""

    middle: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between its ends."""
        return (self.high - self.low) / 2


def interval_of(values: Sequence[float]) -> Interval:
    """Return the median's interval by order statistics (binomial with one half); six at least.

    Raises:
        ValueError: there are fewer values, which bound nothing at that confidence.
    """
    ordered, count = sorted(values), len(values)
    below, rank = 0.0, -1
    for k in range(count // 2):
        below += math.comb(count, k) / 2**count
        if 2 * below > 1 - CONFIDENCE:
            break
        rank = k
    if rank < 0:
        raise ValueError(f"asked for a 95 % interval of {count} values; it takes six at least")
    return Interval(median(ordered), ordered[rank], ordered[count - 1 - rank])


def student_t(freedom: int) -> float:
    """Return Student's t of 95 % on both sides; above ten degrees of freedom within 0.3 %."""
    return _T_95[max(1, freedom) - 1] if freedom <= len(_T_95) else 1.96 + 2.6 / freedom


def mean_interval_of(values: Sequence[float]) -> Interval:
    """Return the mean's interval, values being normally distributed; two at least.

    Raises:
        ValueError: there are fewer values.
    """
    if len(values) < 2:
        raise ValueError(f"asked for the interval of a mean of {len(values)} values; give two")
    middle = fmean(values)
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)
