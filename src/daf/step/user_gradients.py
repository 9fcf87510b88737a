"""Gradients that the user accumulated before a step: set aside, then added to the step's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn

from daf.core.errors import AccumulatedGradientError


class UserGradients:
    """Tells the gradients that a step left in its parameters from those of the user.

    As in plain PyTorch a step adds to gradients that it finds; a session clears only those of
    sessions, its own or one before it over the same model.
    """

    _left: ClassVar[dict[int, tuple[weakref.ref[Tensor], int]]] = {}

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    @contextmanager
    def set_aside(self) -> Iterator[bool]:
        """Clear the gradients of the step before; add the user's after the body, or restore them.

        Yields True if there are any of the user's.

        Raises:
            AccumulatedGradientError: the user has added to what the step before left.
        """
        users = {each: grad for each, grad in self._with_gradients() if self._is_users(grad)}
        for parameter, _ in self._with_gradients():
            parameter.grad = None
        try:
            yield bool(users)
            with torch.no_grad():
                for parameter, grad in users.items():
                    own = parameter.grad
                    parameter.grad = grad if own is None else grad.add_(own)
            self.note_left()  # an interrupt may come before the update
        except BaseException:
            for parameter, _ in self._with_gradients():
                parameter.grad = None
            for parameter, grad in users.items():
                parameter.grad = grad
            raise

    def note_left(self) -> None:
        """Note the gradients that the step leaves, which the next one clears."""
        for key, (reference, _) in [*self._left.items()]:
            if reference() is None:
                self._left.pop(key, None)
        for _, grad in self._with_gradients():
            self._left[id(grad)] = weakref.ref(grad), grad._version

    def _with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        groups = self._optimizer.param_groups
        every = chain(self._model.parameters(), *(group["params"] for group in groups))
        distinct = {id(each): each for each in every}
        return [(each, each.grad) for each in distinct.values() if each.grad is not None]

    def _is_users(self, grad: Tensor) -> bool:
        reference, version = self._left.get(id(grad), (lambda: None, 0))
        if reference() is not grad:
            return True
        if grad._version != version and grad.count_nonzero():
            raise AccumulatedGradientError(
                "asked for a step, which clears the gradients of the step before; found that they "
                "were changed since, as a backward pass of one's own does; call "
                "optimizer.zero_grad() before that pass, so that its gradients are added to"
            )
        return False  # unchanged, or zeroed in place
