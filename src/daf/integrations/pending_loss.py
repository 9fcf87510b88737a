"""A loss that a host asked for, computed only when the host asks for its gradient.

Hosts compute a loss, divide or scale it, and call backward on the result. A stand-in of value 1
goes through the same steps; its derivative says what they multiply the loss by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from daf.core.errors import HostError

Compute = Callable[[nn.Module, Any], Any]


class PendingLoss:
    """The stand-in of one loss at a time, and what computes that loss."""

    def __init__(self) -> None:
        self._stand_in: Tensor | None = None
        self._compute: Compute | None = None
        self._batch: Any = None

    def ask(self, batch: Any, compute: Compute, device: torch.device) -> Tensor:
        """Return a stand-in for ``compute(model, batch)``: a float32 scalar on ``device``.

        HostError: the loss before has no gradient yet.
        """
        if self._stand_in is not None:
            raise HostError(
                "asked for a second loss before the backward pass of the first; within a budget "
                "each loss of a step needs a backward pass of its own: return their sum"
            )
        self._stand_in = torch.ones((), device=device, requires_grad=True)
        self._compute, self._batch = compute, batch
        return self._stand_in

    def take(self, loss: Tensor) -> tuple[Any, Compute]:
        """Return the batch, and what computes the loss for which ``loss`` stands.

        HostError: ``loss`` is not what was asked for, times a number.
        """
        stand_in, compute, batch = self._stand_in, self._compute, self._batch
        self.forget()
        if stand_in is None or compute is None:
            raise HostError(
                "asked for the gradient of a loss that did not come from the host's own loss "
                "function, so that its memory is in no plan; compute it there"
            )
        (slope,) = torch.autograd.grad(loss, stand_in, allow_unused=True)
        if slope is None or not torch.equal(slope, loss.detach()):
            raise HostError(
                "asked for the gradient of more than the host's own loss times a number; add other "
                "terms inside the loss function, which is what runs within the budget"
            )
        factor = float(slope)
        return batch, lambda model, part: compute(model, part) * factor

    def forget(self) -> None:
        """Drop a loss whose gradient nobody asked for."""
        self._stand_in = self._compute = self._batch = None
