"""The 95 % interval of a median over pairs, from ranks alone: step times follow no known law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LEAST_PAIRS = 12
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the two pairs' values between which it lies, 19 times of 20."""

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
