"""Detects from the losses that a run diverges under its codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any, ClassVar

from daf.core.json_dataclasses import Resumable

_SCALE_OF_DEVIATION = 1.4826  # median absolute deviation to standard deviation, Gaussian


class Action(StrEnum):
    """The next action of the training loop."""

    CONTINUE = "continue"
    SAVE = "save"  # the state is good: keep it, and drop the one before
    ROLL_BACK = "roll back"  # return to the good state, with wider codes
    STOP = "stop"  # diverged again, or there is no good state


@dataclass
class DivergenceWatch(Resumable):
    """A state machine of one rollback that tells a diverging run from a noisy one by its losses.

    A loss is a *spike* if it exceeds the median of the last ``window`` losses by more than
    ``deviations`` of their standard deviations (estimated from the median absolute deviation) and
    by more than ``least_rise`` of the median. ``patience`` spikes in a row, or one non-finite loss,
    are a divergence. Spikes do not enter the window. The state is good every ``save_every`` steps,
    once ``patience`` steps have passed without a spike.
    """

    KEPT: ClassVar[Mapping[str, Any]] = {
        "good_step": int,
        "reason": str,
        "losses": tuple[float, ...],
        "spikes": int,
        "calm_since": int,
        "has_rolled_back": bool,
    }

    window: int = 50
    deviations: float = 8.0
    least_rise: float = 0.5
    patience: int = 5
    save_every: int = 100
    good_step: int | None = None
    reason: str = ""
    losses: tuple[float, ...] = ()
    spikes: int = 0
    calm_since: int | None = None
    has_rolled_back: bool = False

    def note(self, step: int, loss: float) -> Action:
        """Take in the loss of step ``step``, before its update; return what to do.

        After ``ROLL_BACK`` the next step may be any after ``good_step``; after ``STOP`` none comes.
        """
        if not math.isfinite(loss):
            return self._diverged(f"the loss of step {step} is {loss}")
        if self._is_spike(loss):
            self.spikes += 1
            self.calm_since = None
            if self.spikes < self.patience:
                return Action.CONTINUE
            return self._diverged(
                f"{self.spikes} losses in a row up to step {step} are far above the usual "
                f"{median(self.losses):.4g}; the last is {loss:.4g}"
            )
        self.spikes = 0
        self.losses = (*self.losses, loss)[-self.window :]
        if self.calm_since is None:
            self.calm_since = step
        return self._save_if_due(step, calm=step - self.calm_since)

    def _is_spike(self, loss: float) -> bool:
        if len(self.losses) < self.window:
            return False
        usual = median(self.losses)
        deviation = _SCALE_OF_DEVIATION * median(abs(each - usual) for each in self.losses)
        rise = loss - usual
        return rise > self.deviations * deviation and rise > self.least_rise * abs(usual)

    def _save_if_due(self, step: int, *, calm: int) -> Action:
        due = self.good_step is None or step - self.good_step >= self.save_every
        # The first state is the first step's, before anything can have gone wrong.
        if due and (self.good_step is None or calm >= min(self.patience, self.save_every)):
            self.good_step = step
            return Action.SAVE
        return Action.CONTINUE

    def _diverged(self, reason: str) -> Action:
        self.reason = reason
        if self.has_rolled_back or self.good_step is None:
            return Action.STOP
        self.has_rolled_back = True
        self.spikes = 0
        self.calm_since = None
        self.losses = ()
        return Action.ROLL_BACK
