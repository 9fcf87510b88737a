"""The noise that codes add beside the batch's own: one record per measurement."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Response(StrEnum):
    """The response to too much noise."""

    WIDENED = "widened"
    NO_ROOM = "no room"  # the budget allows no more bits


@dataclass(frozen=True, slots=True)
class NoiseRecord:
    """One measurement's noise: squared lengths of errors of gradients or steps."""

    step: int
    added_variance: float
    batch_variance: float
    tolerance: float  # the bound of the noise, relative to the batch's
    response: Response | None = None  # None unless the noise exceeds it

    @property
    def relative_noise(self) -> float:
        """Added over the batch's own noise; infinite if only the batch's own is 0."""
        if self.batch_variance > 0.0:
            return self.added_variance / self.batch_variance
        return math.inf if self.added_variance > 0.0 else 0.0

    @property
    def exceeds(self) -> bool:
        """True if the relative noise is above the tolerance, or not a number."""
        return not self.relative_noise <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a line of JSON."""
        return asdict(self) | {"relative_noise": self.relative_noise}
