"""Gradients that the user accumulated before a step: set aside, then added to the step's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from daf.core.errors import AccumulatedGradientError
from daf.recompute.python_state import named_elsewhere
from daf.torch_compat.modules import parameters_of


class UserGradients:
    """Tells the gradients that a step left in its parameters from those of the user.

    As in plain PyTorch a step adds to gradients that it finds; a session clears only those of
    sessions, its own or one before it over the same model. ``elsewhere``: parameters of other
    models that this step's loss function names (a discriminator's, say), whose gradients are the
    user's.
    """

    _left: ClassVar[dict[int, tuple[weakref.ref[Tensor], int]]] = {}

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self.elsewhere: list[nn.Parameter] = []

    def nbytes(self) -> int:
        """Return the bytes of gradients that the next step must hold beside its own."""
        return sum(grad.nbytes for _, grad in self._with_gradients() if not self._is_left(grad))

    @contextmanager
    def set_aside(self, loss_fn: Any = None, *, leaves_to_user: bool = False) -> Iterator[bool]:
        """Clear the gradients of the step before; add the user's after the body, or restore them.

        Yields True if there are any of the user's. ``leaves_to_user``: what the body adds is theirs
        from then on.

        Raises:
            AccumulatedGradientError: the user has added to what the step before left.
        """
        self.elsewhere = parameters_elsewhere(self._model, loss_fn)
        users = {each: grad for each, grad in self._with_gradients() if self._is_users(grad)}
        has_own = bool(users)
        users |= {each: each.grad for each in self.elsewhere if each.grad is not None}
        self.clear()
        try:
            yield has_own
            with torch.no_grad():
                for parameter, grad in users.items():
                    own = parameter.grad
                    parameter.grad = grad if own is None else grad.add_(own)
            if not leaves_to_user:
                self.note_left()  # an interrupt may come before the update
        except BaseException:
            self.clear()
            for parameter, grad in users.items():
                parameter.grad = grad
            raise
        finally:
            self.elsewhere = []

    def clear(self) -> None:
        """Leave nothing that a step may have added, those of ``elsewhere`` included."""
        for parameter, _ in self._with_gradients():
            parameter.grad = None
        for parameter in self.elsewhere:
            parameter.grad = None

    def note_left(self) -> None:
        """Note the gradients that the step leaves, which the next one clears."""
        for key, (reference, _) in [*self._left.items()]:
            if reference() is None:
                self._left.pop(key, None)
        for _, grad in self._with_gradients():
            self._left[id(grad)] = weakref.ref(grad), grad._version

    def _with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        groups = self._optimizer.param_groups
        every = chain(parameters_of(self._model), *(group["params"] for group in groups))
        distinct = {id(each): each for each in every}
        return [(each, each.grad) for each in distinct.values() if each.grad is not None]

    def _is_left(self, grad: Tensor) -> bool:
        reference, _ = self._left.get(id(grad), (lambda: None, 0))
        return reference() is grad

    def _is_users(self, grad: Tensor) -> bool:
        if not self._is_left(grad):
            return True
        _, version = self._left[id(grad)]
        if grad._version != version and grad.count_nonzero():
            raise AccumulatedGradientError(
                "asked for a step, which clears the gradients of the step before; found that they "
                "were changed since, as a backward pass of one's own does; call "
                "optimizer.zero_grad() before that pass, so that its gradients are added to"
            )
        return False  # unchanged, or zeroed in place


def parameters_elsewhere(model: nn.Module, loss_fn: Any) -> list[nn.Parameter]:
    """Return the parameters of modules beside a model that it, or its loss function, names."""
    own = {id(each) for each in parameters_of(model)}
    modules = (each for each in named_elsewhere(model, loss_fn) if isinstance(each, nn.Module))
    found = {id(each): each for module in modules for each in parameters_of(module)}
    return [each for key, each in found.items() if key not in own]
