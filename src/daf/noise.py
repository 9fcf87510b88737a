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
        if action is Action.RETRACE: restore it, go on from ``watch.good_step`` with wider codes
        if action is Action.STOP: tell the user
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from daf.core.errors import DataError

_SCALE_OF_DEVIATION = 1.4826  # median absolute deviation to standard deviation, Gaussian


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


class Action(StrEnum):
    """What whoever trains should do now."""

    CONTINUE = "continue"
    SAVE = "save"  # this is a good state: keep it, and forget the one before
    RETRACE = "retrace"  # go back to the good state, with wider codes
    STOP = "stop"  # it diverged again, or there is no good state


class DivergenceWatch:
    """Tells a diverging run from a noisy one by its losses; a state machine of one retrace.

    A loss is a *spike* when it is above the median of the last ``window`` losses by more than
    ``deviations`` of their own standard deviations (estimated from the median absolute one) and by
    more than the part ``least_rise`` of the median. ``patience`` spikes in a row, or one loss
    that is not finite, are a divergence. Spikes do not enter the window. The state is good
    every ``save_every`` steps, unless the last ``window`` losses hold a spike.
    """

    def __init__(
        self,
        *,
        window: int = 50,
        deviations: float = 8.0,
        least_rise: float = 0.5,
        patience: int = 5,
        save_every: int = 100,
    ) -> None:
        if min(window, patience, save_every) < 1 or deviations <= 0.0 or least_rise < 0.0:
            raise DataError(
                f"asked for a window of {window}, a patience of {patience} and states every "
                f"{save_every} steps; give whole numbers from 1, and deviations above 0"
            )
        self.good_step: int | None = None
        self.reason = ""
        self._losses: deque[float] = deque(maxlen=window)
        self._deviations = deviations
        self._least_rise = least_rise
        self._patience = patience
        self._save_every = save_every
        self._spikes = 0
        self._calm_since: int | None = None
        self._retraced = False

    def note(self, step: int, loss: float) -> Action:
        """Step ``step`` had this loss, before its update; what to do.

        After ``RETRACE`` the next step noted is the one after ``good_step``, or any
        later one, and after ``STOP`` nothing more is expected.
        """
        if not math.isfinite(loss):
            return self._diverged(f"the loss of step {step} is {loss}")
        if self._is_spike(loss):
            self._spikes += 1
            self._calm_since = None
            if self._spikes < self._patience:
                return Action.CONTINUE
            usual = median(self._losses)
            return self._diverged(
                f"{self._spikes} losses in a row up to step {step} are far above the usual "
                f"{usual:.4g}; the last is {loss:.4g}"
            )
        self._spikes = 0
        self._losses.append(loss)
        if self._calm_since is None:
            self._calm_since = step
        return self._save_if_due(step)

    def _is_spike(self, loss: float) -> bool:
        if len(self._losses) < (self._losses.maxlen or 1):
            return False
        usual = median(self._losses)
        deviation = _SCALE_OF_DEVIATION * median(abs(each - usual) for each in self._losses)
        rise = loss - usual
        return rise > self._deviations * deviation and rise > self._least_rise * abs(usual)

    def _save_if_due(self, step: int) -> Action:
        assert self._calm_since is not None
        calm = step - self._calm_since
        due = self.good_step is None or step - self.good_step >= self._save_every
        # The first state is that of the first step, before anything can have gone wrong.
        if due and (self.good_step is None or calm >= min(self._patience, self._save_every)):
            self.good_step = step
            return Action.SAVE
        return Action.CONTINUE

    def _diverged(self, reason: str) -> Action:
        self.reason = reason
        if self._retraced or self.good_step is None:
            return Action.STOP
        self._retraced = True
        self._spikes = 0
        self._calm_since = None
        self._losses.clear()
        return Action.RETRACE

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs (JSON-able)."""
        return {
            "good_step": self.good_step,
            "reason": self.reason,
            "losses": list(self._losses),
            "spikes": self._spikes,
            "calm_since": self._calm_since,
            "retraced": self._retraced,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.good_step = state["good_step"]
        self.reason = state["reason"]
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._spikes = state["spikes"]
        self._calm_since = state["calm_since"]
        self._retraced = state["retraced"]
