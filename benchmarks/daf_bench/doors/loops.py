"""The loops that train a workload through each door; ``peer_methods`` has plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import daf
from daf.core.errors import UnknownNameError
from daf.step.microbatch import LossFunction, likely_cut, read_loss
from daf.torch_compat import compiler

ACCUMULATED = 4  # batches to an update, in loops that accumulate
MOST_NORM = 1.0
DOORS = ("step", "backward", "compress")
Step = Callable[[Any], float]


class DoorLoop:
    """One model trained within a budget through one door; ``step`` trains one batch.

    Raises:
        UnknownNameError: there is no such door.
    """

    def __init__(
        self,
        door: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        options: dict[str, Any],
    ) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._batches = 0
        self.step: Step = self._through(door, options)

    def _through(self, door: str, options: dict[str, Any]) -> Step:
        if door == "compress":
            options = {name: each for name, each in options.items() if name != "baseline_bytes"}
            forward = daf.compress(self._model, **options)
            self._door: Any = forward
            return lambda batch: self._compressed(forward, batch)
        session = daf.Session(self._model, self._optimizer, split=False, **options)
        self._door = session
        if door == "step":
            return lambda batch: session.step(batch, self._loss_fn).loss
        if door == "backward":
            return lambda batch: self._accumulated(session, batch)
        raise UnknownNameError(f"unknown door {door!r}; known: {', '.join(DOORS)}")

    @property
    def peak_bytes(self) -> int:
        """The process's peak since the loop began, measuring included."""
        found: int = self._door.peak_bytes
        return found

    def _accumulated(self, session: daf.Session, batch: Any) -> float:
        """Clip and update after every fourth batch, as loops that accumulate do."""
        self._batches += 1
        loss = session.backward(batch, self._share_of_loss).loss
        if self._batches % ACCUMULATED == 0:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), MOST_NORM)
            compiler.step(self._optimizer)
            self._optimizer.zero_grad(set_to_none=True)
        return loss * ACCUMULATED

    def _share_of_loss(self, model: nn.Module, batch: Any) -> Any:
        found = self._loss_fn(model, batch)
        if isinstance(found, tuple):
            return found[0] / ACCUMULATED, found[1]
        return found / ACCUMULATED

    def _compressed(self, forward: Any, batch: Any) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        with forward:
            found = self._loss_fn(self._model, batch)
            loss = read_loss(found, likely_cut(batch).size(batch)).mean
        loss.backward()  # type: ignore[no-untyped-call]
        compiler.step(self._optimizer)
        return loss.item()
