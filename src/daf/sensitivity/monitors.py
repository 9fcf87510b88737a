"""Watching a run: is the noise that codes add small beside the batch's own, and does it learn?

Two things without torch, device or clock, fed by whoever trains:

- :class:`NoiseWatch` follows the added noise relative to the batch's own (the number
  that ``tolerance`` bounds), tells it every few steps, and asks for more bits when
  it is too large, or says that none are to be had.
- :class:`DivergenceWatch` says when a run has gone astray and whether to go back to the last good
  state, which it asks for once.

::

    watch = DivergenceWatch()
    for step in range(steps):
        action = watch.note(step, loss)
        if action is Action.SAVE: keep a copy of everything
        if action is Action.ROLL_BACK: restore it, go on from ``watch.good_step`` with wider codes
        if action is Action.STOP: tell the user
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from daf.core.errors import DataError


class Response(StrEnum):
    """What could be done about too much noise."""

    WIDENED = "widened"
    NO_ROOM = "no room"  # the budget allows no more bits


@dataclass(frozen=True, slots=True)
class NoiseRecord:
    """One line of the log: squared lengths of errors of gradients or steps, over an interval."""

    step: int
    added_variance: float
    batch_variance: float
    tolerance: float
    response: Response | None = None

    @property
    def relative_noise(self) -> float:
        """Added over the batch's own; infinite where the batch has none and something was added."""
        if self.batch_variance > 0.0:
            return self.added_variance / self.batch_variance
        return math.inf if self.added_variance > 0.0 else 0.0

    @property
    def exceeds(self) -> bool:
        """Is it above the tolerance?"""
        return self.relative_noise > self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a line of JSON."""
        return asdict(self) | {"relative_noise": self.relative_noise}


class NoiseWatch:
    """A running estimate of the added noise, and one answer to every excess.

    Both variances are exponential averages, since each measurement of them scatters.
    An excess is answered only once per interval, after which the average
    begins anew: what was added under the narrower codes says nothing of the wider ones.
    """

    def __init__(
        self,
        tolerance: float,
        widen: Callable[[NoiseRecord], bool],
        *,
        interval: int = 50,
        memory: float = 0.8,
        on_record: Callable[[NoiseRecord], None] = lambda _: None,
    ) -> None:
        """Watch for more than ``tolerance``.

        Args:
            tolerance: the largest added noise relative to the batch's own.
            widen: makes codes wider, and says whether it could.
            interval: steps between two records, at least 1.
            memory: how much of the average a new measurement leaves, 0 to below 1.
            on_record: told every record, the answer included.

        Raises:
            DataError: a number is out of its range.
        """
        if not tolerance > 0.0 or interval < 1 or not 0.0 <= memory < 1.0:
            raise DataError(
                f"asked to watch for a noise of {tolerance} every {interval} steps with a memory "
                f"of {memory}; give a tolerance above 0, steps from 1 and a memory from 0 below 1"
            )
        self.tolerance = tolerance
        self._widen = widen
        self._interval = interval
        self._memory = memory
        self._on_record = on_record
        self._added = _Average(memory)
        self._own = _Average(memory)
        self._last_told: int | None = None

    def note(self, step: int, added_variance: float, batch_variance: float) -> NoiseRecord | None:
        """A measurement or prediction for one step; the record, if it was time for one.

        A variance that is not finite counts as an excess at once, and is not averaged.
        """
        if not (math.isfinite(added_variance) and math.isfinite(batch_variance)):
            return self._tell(NoiseRecord(step, math.inf, batch_variance, self.tolerance))
        self._added.add(added_variance)
        self._own.add(batch_variance)
        if self._last_told is not None and step - self._last_told < self._interval:
            return None
        return self._tell(NoiseRecord(step, self._added.value, self._own.value, self.tolerance))

    def _tell(self, record: NoiseRecord) -> NoiseRecord:
        self._last_told = record.step
        if record.exceeds or math.isinf(record.added_variance):
            widened = self._widen(record)
            response = Response.WIDENED if widened else Response.NO_ROOM
            record = NoiseRecord(
                record.step,
                record.added_variance,
                record.batch_variance,
                record.tolerance,
                response,
            )
            if widened:
                self._added = _Average(self._memory)
        self._on_record(record)
        return record


class _Average:
    """Exponential, unbiased from its first value on (Kingma and Ba, ICLR 2015, section 3)."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = self._memory * self._sum + (1.0 - self._memory) * value
        self._weight = self._memory * self._weight + (1.0 - self._memory)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0
