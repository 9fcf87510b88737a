"""A replayed call finds what it found before: random numbers of every default generator, and what
its parts keep in Python. It leaves no trace of its second run."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from exactness import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import at_most
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import SavedTensorError
from daf.core.policy import Policy, plain_policy
from daf.pool.store import PlainStore
from daf.recompute.random_state import Generators

pytestmark = pytest.mark.smoke

WIDTH = 8
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy normal": lambda: float(np.random.normal()),
}


def replaying(*paths: str) -> Policy:
    return replace(plain_policy(), replayed=frozenset(paths))


def random_states() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return (random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist())


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Drawing(nn.Module):
    """Scales its input by drawn numbers before a product with its weight."""

    def __init__(self, draws: list[str]) -> None:
        super().__init__()
        self.draws = draws
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for draw in self.draws:
            x = x * (1 + DRAWS[draw]())
        return self.layer(x).tanh()


def trained(model: nn.Module, policy: Policy) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Gradients of two steps, and the random states behind them."""
    seed_all(1)
    model = copy.deepcopy(model)
    capture = Capture(model, PlainStore())
    for _ in range(2):
        with capture.step(policy, 0, 0):
            loss = model(torch.ones(3, WIDTH)).square().sum()
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], random_states()


@given(
    calls=st.lists(st.lists(st.sampled_from(sorted(DRAWS)), max_size=3), min_size=1, max_size=4),
    replayed=st.sets(st.integers(0, 3)),
)
@settings(max_examples=at_most(200, 15), deadline=None)
def test_every_default_generator_is_restored(calls: list[list[str]], replayed: set[int]) -> None:
    model = nn.Sequential(*map(Drawing, calls))
    paths = (str(each) for each in replayed if each < len(calls))
    plain, states = trained(model, plain_policy())
    again, states_again = trained(model, replaying(*paths))
    assert all(map(same_bits, plain, again))
    assert states == states_again


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=4), st.integers(0, 1))
@settings(max_examples=at_most(200, 15), deadline=None)
def test_only_what_was_drawn_from_is_kept(draws: list[str], pending: int) -> None:
    seed_all(3)
    for _ in range(pending):
        np.random.normal()  # leaves a second one pending
    generators = Generators()
    generators.state([])
    state = generators.state([])
    before = random_states()
    drawn = [DRAWS[each]() for each in draws]
    used = state.used()
    assert len(used._states) == len({each.split()[0] for each in draws})
    assert (used.nbytes > 0) == bool(draws)
    after = random_states()
    with used.restored():
        assert random_states() == before
        assert [DRAWS[each]() for each in draws] == drawn
    assert random_states() == after


def test_another_bit_generator_of_numpy_is_restored() -> None:
    found = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = Generators().state([])
        drawn = np.random.random()
        with state.used().restored():
            assert np.random.random() == drawn
    finally:
        np.random.set_bit_generator(found)


@dataclass
class Counts:
    calls: int = 0
    seen: list[int] = field(default_factory=list)


class Remembering(nn.Module):
    """Keeps a counter, containers and objects, on each of which its result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls, self.counts = 0, Counts()
        self.cache: list[Tensor] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.named: dict[str, Any] = {"inner": {"calls": 0}}
        self.known: set[int] = set()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counts.calls += 1
        self.counts.seen.append(self.calls)
        self.cache.append(x)
        self.recent.append(self.calls)
        self.named["inner"]["calls"] += 1
        self.named[str(self.calls)] = x
        self.known.add(self.calls)
        before = 0 if self.last is None else self.last.detach().mean()
        if not hasattr(self, "first"):
            self.first = x
        total = sum((each.mean() for each in self.cache), before)
        factor = self.calls + self.counts.calls + len(self.counts.seen) + sum(self.recent)
        factor += self.named["inner"]["calls"] + len(self.named) + len(self.known)
        self.last = self.layer(x * factor + total).tanh()
        return self.last * self.last

    def kept(self) -> list[Any]:
        containers = (self.cache, self.recent, self.named, self.known, self.counts.seen)
        return [self.calls, self.counts.calls, *map(len, containers), [*self.recent]]


def test_what_a_module_keeps_in_python_is_restored() -> None:
    found = []
    for policy in (plain_policy(), replaying("0", "1", "1.layer")):
        torch.manual_seed(0)
        model = nn.Sequential(Remembering(), Remembering())
        capture = Capture(model, PlainStore())
        gradients = []
        for step in range(3):
            with capture.step(policy, 0, step):
                loss = model(torch.full((2, WIDTH), 0.01)).sum()
            (gradient,) = torch.autograd.grad(loss, [model[0].layer.weight], retain_graph=step == 1)
            gradients.append(gradient)
            for each in model:
                each.cache[:] = [tensor.detach() for tensor in each.cache]
        found.append((gradients, [each.kept() for each in model]))
    assert all(map(same_bits, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


class Averaging(nn.Module):
    """Keeps an average in place in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return self.layer(x - self.average).tanh()


def test_a_tensor_changed_in_place_that_is_no_buffer_is_refused() -> None:
    model = nn.Sequential(Averaging())
    with (
        Capture(model).step(replaying("0"), 0, 0),
        pytest.raises(SavedTensorError, match=r"'average' in place.*register that tensor"),
    ):
        model(torch.ones(2, WIDTH))
