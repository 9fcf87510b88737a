"""Extra passes that training never notices: random states and buffers are put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


class RandomState:
    """PyTorch's, NumPy's and Python's generators as they are now; CUDA's where it is in use."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Make them so again; may be called any number of times."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[RandomState]:
    """Random states and buffers are at the end as at the beginning; gives the random state."""
    state = RandomState()
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield state
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():  # a module may have put another in its place
                buffer.copy_(values[name])
        state.restore()


@contextmanager
def apart_from_training(model: nn.Module) -> Iterator[RandomState]:
    """The same, with gradients put aside: the body finds none, and its own are dropped."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with undisturbed(model) as state:
            yield state
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
