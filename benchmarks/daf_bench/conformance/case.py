"""What a case of conformance is: a model, its batch and its loss, built anew for every way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

Loss = Callable[[nn.Module, Any], Any]


@dataclass(eq=False)
class Work:
    """One fresh copy of a case.

    Args:
        model: what is trained.
        batch: given to ``loss``; a list named ``batches`` in ``more`` follows it step by step.
        loss: ``loss(model, batch)``, as ``Session.step`` takes it.
        more: batches of the steps after the first, repeated in turn; empty: the same batch.
        optimizer: makes the optimizer; plain SGD with momentum by default.
        before: called with the step's index before each step (late paths, hooks added later).
        reset: puts back what no library can know of (a generator outside the model).
        carried: returns state outside parameters and buffers that steps carry on.
        precision: the least precise type that the model computes in.
    """

    model: nn.Module
    batch: Any
    loss: Loss
    more: list[Any] = field(default_factory=list)
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] | None = None
    before: Callable[[int], None] = lambda _: None
    reset: Callable[[], None] = lambda: None
    carried: Callable[[], Any] = lambda: None
    precision: torch.dtype = torch.float32

    def batch_of(self, step: int) -> Any:
        """Return the batch of a step."""
        every = [self.batch, *self.more]
        return every[step % len(every)]

    def make_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """Return a new optimizer over the model's parameters that can be trained."""
        if self.optimizer is not None:
            return self.optimizer(self.model, learning_rate)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        return torch.optim.SGD(trained, lr=learning_rate, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    """A named model or situation.

    ``right_errors``: names of errors that are a right answer where a lever was forced.
    ``is_sizable``: it also measures the cost of proofs, and trains within a tight budget.
    """

    name: str
    build: Callable[[], Work]
    right_errors: tuple[str, ...] = ()
    is_sizable: bool = False

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]


class NotApplicableError(Exception):
    """A case cannot be built or trained by plain PyTorch here; its words say why."""


def is_lazy(model: nn.Module) -> bool:
    """True if the first forward pass will draw some of the model's weights."""
    return any(map(nn.parameter.is_lazy, model.parameters()))


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def built(case: Case, seed: int) -> Work:
    """Return a fresh copy with the same weights for the same seed, in training mode as built.

    Raises:
        NotApplicableError: it cannot be built here.
    """
    seed_all(seed)
    try:
        return case.build()
    except NotApplicableError:
        raise
    except Exception as error:
        raise NotApplicableError(f"not built: {type(error).__name__}: {error!s:.200}") from error


class CaseList(list[Case]):
    """The cases of one file; ``@cases.add("name")`` adds one by the function that builds it."""

    def add(
        self, name: str, *, right_errors: tuple[str, ...] = ()
    ) -> Callable[[Callable[[], Work]], Callable[[], Work]]:
        """Return a decorator that adds a situation."""

        def note(build: Callable[[], Work]) -> Callable[[], Work]:
            self.append(Case(f"situations/{name}", build, right_errors=right_errors))
            return build

        return note
