"""Gradients that the user accumulated before a step: set aside, then added to the step's own."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn

from daf.core.errors import AccumulatedGradientError
from daf.saved_tensors.ledger import gradient_bytes
from daf.torch_compat.modules import parameters_of


class UserGradients:
    """Tells the gradients that a step left in its parameters from those of the user.

    As in plain PyTorch a step adds to gradients that it finds; a session clears only those of
    sessions, its own or one before it over the same model. ``elsewhere``: other models' parameters
    that the loss function names (a discriminator's, say), whose gradients are the user's.
    """

    _left: ClassVar[dict[int, tuple[weakref.ref[Tensor], int]]] = {}

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.elsewhere: list[nn.Parameter] = []
        self._noted: list[Tensor] = []

    def nbytes(self) -> int:
        """Return the bytes of gradients that the next step must hold beside its own."""
        return sum(gradient_bytes(p) for p, g in self._with_gradients() if not self._is_left(g))

    @contextmanager
    def set_aside(
        self, parameters: list[nn.Parameter], elsewhere: list[nn.Parameter], *, leaves_to_user: bool
    ) -> Iterator[bool]:
        """Clear the gradients of the step before; add the user's after the body, or restore them.

        Yields True if there are any of the user's. ``leaves_to_user``: what the body adds is theirs
        from then on. AccumulatedGradientError: the user has added to what the step before left.
        """
        self.elsewhere = elsewhere
        found = self._with_gradients(parameters)
        users = {each: grad for each, grad in found if self._is_users(grad)}
        has_own = bool(users)
        users |= {each: each.grad for each in self.elsewhere if each.grad is not None}
        # Those that another session's step left are cleared by its next one, with what is added.
        others = {each for each in elsewhere if each in users and self._is_left(users[each])}
        cleared = [*self.elsewhere, *(each for each, _ in found)]
        del found  # this frame lives as long as the step: it would hold the step before's gradients
        for parameter in cleared:
            parameter.grad = None
        try:
            yield has_own
            with torch.no_grad():
                for parameter, grad in users.items():
                    own = None if parameter in others else parameter.grad
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
        own = (parameter for parameter, _ in self._with_gradients())
        for parameter in chain(own, self.elsewhere):
            parameter.grad = None

    def note_left(self) -> None:
        """Note the gradients that the step leaves, which the next one clears."""
        self._noted = [parameter for parameter, _ in self._with_gradients()]
        for key, (reference, _) in [*self._left.items()]:
            if reference() is None:
                self._left.pop(key, None)
        self.note_updated()

    def note_updated(self) -> None:
        """Note what an update did to the gradients that were noted last: it may change them."""
        for parameter in self._noted:
            if (grad := parameter.grad) is not None:
                self._left[id(grad)] = weakref.ref(grad), grad._version

    def _with_gradients(
        self, parameters: list[nn.Parameter] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return what has gradients; ``parameters``: the model's, if known."""
        own = parameters_of(self._model) if parameters is None else parameters
        groups = self._optimizer.param_groups
        distinct = {id(e): e for e in chain(own, *(group["params"] for group in groups))}
        return [(e, grad) for e in distinct.values() if (grad := e.grad) is not None]

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
