"""Extra passes that training never notices: random states and buffers are put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


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
        state.restore()
        with torch.no_grad():
            _restore(model, values)


def _restore(model: nn.Module, values: dict[str, Tensor]) -> None:
    """By name: a module may have put another buffer in its place. One that was made meanwhile, or
    has another shape now, is a cache of the module's own, and stays.
    """
    for name, buffer in model.named_buffers():
        if name in values and values[name].shape == buffer.shape:
            buffer.copy_(values[name])


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
