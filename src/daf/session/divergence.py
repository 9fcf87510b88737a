"""Watching the losses for a run that diverges under its codes."""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from statistics import median
from typing import Any

from daf.core.errors import DataError

_SCALE_OF_DEVIATION = 1.4826  # median absolute deviation to standard deviation, Gaussian


class Action(StrEnum):
    """What whoever trains should do now."""

    CONTINUE = "continue"
    SAVE = "save"  # this is a good state: keep it, and forget the one before
    ROLL_BACK = "roll back"  # go back to the good state, with wider codes
    STOP = "stop"  # it diverged again, or there is no good state


class DivergenceWatch:
    """Tells a diverging run from a noisy one by its losses; a state machine of one rollback.

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
        self._has_rolled_back = False

    def note(self, step: int, loss: float) -> Action:
        """Step ``step`` had this loss, before its update; what to do.

        After ``ROLL_BACK`` the next step noted is the one after ``good_step``, or any
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
        if self._has_rolled_back or self.good_step is None:
            return Action.STOP
        self._has_rolled_back = True
        self._spikes = 0
        self._calm_since = None
        self._losses.clear()
        return Action.ROLL_BACK

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs (JSON-able)."""
        return {
            "good_step": self.good_step,
            "reason": self.reason,
            "losses": list(self._losses),
            "spikes": self._spikes,
            "calm_since": self._calm_since,
            "has_rolled_back": self._has_rolled_back,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.good_step = state["good_step"]
        self.reason = state["reason"]
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._spikes = state["spikes"]
        self._calm_since = state["calm_since"]
        self._has_rolled_back = state["has_rolled_back"]
