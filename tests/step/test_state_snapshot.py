"""A snapshot restores generators, buffers and what a model keeps in Python."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from daf.recompute.python_state import Surroundings
from daf.step.state_snapshot import StepSnapshot, preserved_state

pytestmark = pytest.mark.smoke

GLOBAL = torch.Generator().manual_seed(3)


class Own(nn.Module):
    """Draws from generators of its own and from a global one, counts, caches and averages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.torch = torch.Generator().manual_seed(1)
        self.numpy, self.legacy = np.random.default_rng(1), np.random.RandomState(1)
        self.inner = {"python": random.Random(1)}
        self.average, self.calls = torch.zeros(4), 0
        self.seen: list[int] = []

    def draws(self) -> list[float]:
        own = torch.rand((), generator=self.torch).item()
        drawn = [torch.rand((), generator=each).item() for each in (GLOBAL,)]
        legacy = self.legacy.normal()
        return [own, *drawn, self.numpy.random(), legacy, self.inner["python"].random()]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.average.mul_(0.5).add_(x.detach().mean(0))
        self.last = self.layer(x * sum(self.draws()))
        return self.last

    def kept(self) -> list[Any]:
        return [self.calls, list(self.seen), hasattr(self, "last")]


def test_a_pass_leaves_no_trace() -> None:
    plain = Own()
    GLOBAL.manual_seed(3)
    expected = plain.draws(), plain.kept()
    GLOBAL.manual_seed(3)
    model = Own()
    average = model.average
    with preserved_state(model):
        for _ in range(3):
            model(torch.ones(2, 4))
    assert (model.draws(), model.kept()) == expected
    assert model.average is average
    assert not average.any()


def test_a_step_that_is_tried_again_holds_no_graph() -> None:
    model = Own()
    model(torch.ones(2, 4))
    held = torch.ones(1, requires_grad=True) * 1
    model.seen.append(held)  # type: ignore[arg-type] - what holds a graph is left alone
    snapshot = StepSnapshot(Surroundings.of(model))
    expected = model.draws()
    last = weakref.ref(model.last)
    model(torch.ones(2, 4))
    assert last() is None, "the snapshot holds a result of the step before"
    snapshot.restore()
    assert model.draws() == expected
    assert model.calls == 1
    assert len(model.seen) == 2


class Collecting(nn.Module):
    """Registers a hook in its first pass, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_hooked = nn.Linear(4, 4), False
        self.layer.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda _module, _inputs, out: self.found.append(out))
            self.is_hooked = True
        self.found = found
        self.layer(self.layer(x))
        return torch.cat(self.found)


def test_hooks_that_forward_registers_are_not_there_twice_after_measuring() -> None:
    model, x = Collecting(), torch.randn(3, 4)
    with preserved_state(model):
        assert len(model(x)) == 6
    assert not model.is_hooked
    assert len(model.layer._forward_hooks) == 1
    assert len(model(x)) == 6


def test_a_refused_attempt_s_graph_is_let_go_though_the_model_keeps_it() -> None:
    model = Own()
    model(torch.ones(2, 4))
    model.other = model.layer(torch.ones(2, 4))  # another graph, which the attempt leaves alone
    before, other = weakref.ref(model.last), model.other
    value = model.last.detach().clone()
    snapshot = StepSnapshot(Surroundings.of(model))
    model(torch.ones(2, 4))
    assert before() is None  # freed as plainly
    attempt = weakref.ref(model.last)
    snapshot.restore()
    assert attempt() is None
    assert model.last.grad_fn is None
    assert torch.equal(model.last, value)
    assert model.other is other
    assert other.grad_fn is not None
