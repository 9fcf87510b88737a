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
from daf.step.other_leaves import OtherLeaves
from daf.torch_compat.modules import parameters_of


class UserGradients:
    """Tells the gradients that a step left in its parameters from those of the user.

    As in plain PyTorch a step adds to gradients that it finds; a session clears only those of
    sessions, its own or one before it over the same model. ``others``: what else the step's losses
    lead to (a discriminator's parameters, say), whose gradients are the user's.
    """

    _left: ClassVar[dict[int, tuple[weakref.ref[Tensor], int]]] = {}

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer, self.are_waiting = model, optimizer, False
        self.others, self._met = OtherLeaves(), list[weakref.ref[Tensor]]()
        self._noted: list[Tensor] = []

    def nbytes(self) -> int:
        """Return the bytes of gradients that the next step must hold beside its own."""
        return sum(gradient_bytes(p) for p, g in self._with_gradients() if not self._is_left(g))

    @contextmanager
    def set_aside(
        self, parameters: list[nn.Parameter], named: list[Tensor], *, leaves_to_user: bool
    ) -> Iterator[None]:
        """Clear the gradients of the step before; add the user's after the body, or restore them.

        ``named``: leaves that may get gradients, too. ``leaves_to_user``: what the body adds is the
        user's from then on; AccumulatedGradientError if they added to what the step before left.
        """
        found = self._with_gradients(parameters)
        users = {each: grad for each, grad in found if self._is_users(grad)}
        met = (leaf for each in self._met if (leaf := each()) is not None)  # by steps before
        self.are_waiting = bool(users)
        others = self.others = OtherLeaves(self._own(parameters), chain(named, met))
        cleared = [each for each, _ in found]
        del found  # this frame lives as long as the step: it would hold the step before's gradients
        for parameter in cleared:
            parameter.grad = None
        try:
            yield
            with torch.no_grad():
                for parameter, grad in chain(users.items(), others.taken()):
                    if grad is not None:
                        # What another session's step left is cleared by its next one, with this.
                        own = None if self._is_left(grad) else parameter.grad
                        parameter.grad = grad if own is None else grad.add_(own)
            if not leaves_to_user:
                self.note_left()  # an interrupt may come before the update
        except BaseException:
            self.clear()
            others.put_back()
            for parameter, grad in users.items():
                parameter.grad = grad
            raise
        finally:
            self._met = [each for each in (*self._met, *others.met) if each() is not None]
            self.others = OtherLeaves()

    def clear(self) -> None:
        """Leave nothing that a step may have added, to ``others`` neither."""
        self.others.put_back(had=False)
        for parameter, _ in self._with_gradients():
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
        return [(e, grad) for e in self._own(parameters) if (grad := e.grad) is not None]

    def _own(self, parameters: list[nn.Parameter] | None = None) -> list[Tensor]:
        own = parameters_of(self._model) if parameters is None else parameters
        groups = self._optimizer.param_groups
        return [*{id(e): e for e in chain(own, *(group["params"] for group in groups))}.values()]

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
