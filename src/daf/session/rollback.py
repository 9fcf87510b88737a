"""Rollback: a run that diverges under its codes restarts from its last good state, once.

While codes are lossy, ``DivergenceWatch`` judges every step's loss; a good state goes to a file.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daf.core.errors import DivergedError
from daf.files.checkpoint import read_checkpoint, write_checkpoint
from daf.session.divergence import Action, DivergenceWatch

_NAME = "good.safetensors"


class Rollback:
    """One session's good state: parameters, buffers and optimizer state, but not learning rates.

    ``asked``: the file to keep it in; True for a temporary one; False to watch nothing.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, asked: Path | bool
    ) -> None:
        self.watch = DivergenceWatch()
        self.is_on = bool(asked)
        self._model = model
        self._optimizer = optimizer
        self._path = asked if isinstance(asked, Path) else None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._action = Action.CONTINUE

    def note(self, step_index: int, loss: float) -> bool:
        """Take in a step's loss before its update; True if it is time to go back.

        Raises:
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
        """Keep the state if it is good, after the update of the step noted last.

        Raises:
            RunFolderError: the state cannot be written.
        """
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
