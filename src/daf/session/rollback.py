"""Rollback: a run that diverges under its codes restarts from its last good state, once.

While codes are lossy, ``DivergenceWatch`` judges every step's loss; a good state goes to a file.
"""

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daf.core.errors import DivergedError
from daf.core.json_dataclasses import Resumable
from daf.files.checkpoint import read_checkpoint, write_checkpoint

_SCALE_OF_DEVIATION = 1.4826  # median absolute deviation to standard deviation, Gaussian


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)  # ``statistics`` would be half a megabyte in each training process
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


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

    KEPT = ("good_step", "reason", "losses", "spikes", "calm_since", "has_rolled_back")

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
                f"{_median(self.losses):.4g}; the last is {loss:.4g}"
            )
        self.spikes = 0
        self.losses = (*self.losses, loss)[-self.window :]
        if self.calm_since is None:
            self.calm_since = step
        # The first state is the first step's, before anything can have gone wrong.
        is_due = self.good_step is None or step - self.good_step >= self.save_every
        is_calm = step - self.calm_since >= min(self.patience, self.save_every)
        if is_due and (self.good_step is None or is_calm):
            self.good_step = step
            return Action.SAVE
        return Action.CONTINUE

    def _is_spike(self, loss: float) -> bool:
        if len(self.losses) < self.window:
            return False
        usual = _median(self.losses)
        deviation = _SCALE_OF_DEVIATION * _median([abs(each - usual) for each in self.losses])
        rise = loss - usual
        return rise > self.deviations * deviation and rise > self.least_rise * abs(usual)

    def _diverged(self, reason: str) -> Action:
        self.reason = reason
        if self.has_rolled_back or self.good_step is None:
            return Action.STOP
        self.has_rolled_back, self.spikes = True, 0
        self.calm_since = None
        self.losses = ()
        return Action.ROLL_BACK


_NAME = "good.safetensors"


class Rollback:
    """One session's good state: parameters, buffers and optimizer state, but not learning rates.

    ``asked``: the file to keep it in; True for a temporary one; False to watch nothing.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, asked: str | Path | bool
    ) -> None:
        self.watch = DivergenceWatch()
        self.is_on = bool(asked)
        self._model, self._optimizer = model, optimizer
        self._path = None if isinstance(asked, bool) else Path(asked)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._action = Action.CONTINUE

    def note(self, step_index: int, loss: float) -> bool:
        """Take in a step's loss before its update; True if it is time to go back.

        DivergedError: the run diverged again, or before there was a good state.
        """
        if not self.is_on:
            return False
        found = self.watch.note(step_index, loss)
        if self._action is not Action.SAVE or found is not Action.CONTINUE:
            self._action = found  # a state to save waits for the update
        if self._action is Action.STOP and math.isfinite(loss):
            raise DivergedError(
                f"{self.watch.reason}; going back was tried once, or there is nothing to go back "
                "to: try a lower learning rate, more bits, or a larger budget"
            )
        return self._action is Action.ROLL_BACK

    def save_if_good(self) -> None:
        """Keep a good state, after the update of the step noted last; may raise RunFolderError."""
        if self._action is not Action.SAVE:
            return
        self._action = Action.CONTINUE
        state = {"step": self.watch.good_step}
        write_checkpoint(self._file(), self._model, self._optimizer, state)

    def restore(self) -> int:
        """Restore parameters, buffers, optimizer and random states; return the steps done then.

        Raises:
            RunFolderError: the file is gone or damaged.
            DivergedError: the file is of another step.
        """
        settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()  # the file's copy needs the room
        state = read_checkpoint(self._file(), self._model, self._optimizer)
        if state["step"] != self.watch.good_step:  # a killed process left it after its checkpoint
            raise DivergedError(
                f"{self.watch.reason}; the good state in {self._file()} is of step "
                f"{state['step']}, not {self.watch.good_step}: try a lower learning rate anew"
            )
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
        return int(state["step"]) + 1

    def close(self) -> None:
        """Remove the temporary file."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _file(self) -> Path:
        if self._path is not None:
            return self._path
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="daf-")
        return Path(self._folder.name) / _NAME

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs (JSON-able); the file stays where it is."""
        return self.watch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; a state in a temporary file is gone."""
        self.watch.load_state_dict(state)
        if self._path is None or not self._path.exists():
            self.watch.good_step = None
