"""A proof runs calls again: what repeats itself is let through, what does not is named."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import at_most
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf.recompute.proof import NO_ROOM, NO_TIME, ReplayProof

pytestmark = pytest.mark.smoke

WIDTH = 8
Factor = Callable[["Scaled"], Any]
GENERATOR = torch.Generator().manual_seed(1)
TICKS = itertools.count(1)
SEEN: list[int] = []


class Scaled(nn.Module):
    """A layer behind a product with a factor, which may come from anywhere."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.factor = factor
        self.calls = 0
        self.cache: dict[str, Any] = {}
        self.seen: list[int] = []
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("count", torch.zeros(()))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x * self.factor(self)).tanh()
        return found


def counted(module: Scaled) -> int:
    module.calls += 1
    return module.calls


def cached(module: Scaled) -> Tensor:
    if "noise" not in module.cache:
        module.cache["noise"] = torch.rand(WIDTH)
    module.cache["noise"] = module.cache["noise"] * 2
    return module.cache["noise"]


def collected(module: Scaled) -> int:
    module.seen.append(1)
    return len(module.seen)


def counted_in_buffer(module: Scaled) -> Tensor:
    module.count.add_(1)
    return module.count.clone()


def seen_by_all(_: Scaled) -> int:
    SEEN.append(1)
    return len(SEEN)


def closure() -> Factor:
    calls = 0

    def factor(_: Scaled) -> int:
        nonlocal calls
        calls += 1
        return calls

    return factor


@lru_cache
def remembered() -> Tensor:
    return torch.rand(WIDTH)


REPEATED: dict[str, Factor] = {
    "constant": lambda _: 2.0,
    "dropout": lambda _: F.dropout(torch.ones(WIDTH), 0.5),
    "torch": lambda _: torch.rand(()).item(),
    "python": lambda _: random.random(),
    "numpy": lambda _: np.random.normal(),
    "its own generator": lambda m: torch.rand((), generator=m.generator).item(),
    "layer dropped": lambda _: float(torch.rand(()) < 0.5),
    "counter": counted,
    "cache": cached,
    "list": collected,
    "buffer": counted_in_buffer,
    "remembered before": lambda _: remembered(),
    "checkpointed": lambda m: checkpoint(m.layer, torch.ones(WIDTH), use_reentrant=False),
}
OTHERS: dict[str, Factor] = {
    "generator elsewhere": lambda _: torch.rand((), generator=GENERATOR).item(),
    "iterator elsewhere": lambda _: next(TICKS),
    "list elsewhere": seen_by_all,
    "counter in a closure": closure(),
    "clock": lambda _: float(time.perf_counter_ns() % 1000003),
    "unseeded": lambda _: np.random.default_rng().random(),
}


def refusals(model: nn.Module, *paths: str, **limits: Any) -> dict[str, str]:
    proof = ReplayProof(model, paths, **limits)
    with proof.watching():
        model(torch.ones(3, WIDTH, requires_grad=True)).square().sum()
    return dict(proof.run_again())


def test_only_what_the_calls_that_are_tried_save_is_read() -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Sigmoid())
    proof = ReplayProof(model, ["1"])
    with proof.watching():
        model(torch.ones(3, WIDTH, requires_grad=True)).square().sum()
    assert len(proof._saves.found) == 1
    assert proof.run_again() == {}


@pytest.mark.parametrize("kind", REPEATED)
def test_what_repeats_itself_is_let_through(kind: str) -> None:
    model = nn.Sequential(Scaled(REPEATED[kind]), Scaled(REPEATED[kind]))
    before = torch.get_rng_state(), random.getstate()
    refused = refusals(model, "0", "1", "1.layer")
    assert refused == {}
    if kind == "constant":
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()


@pytest.mark.parametrize("kind", OTHERS)
def test_what_does_not_is_named(kind: str) -> None:
    model = nn.Sequential(Scaled(REPEATED["constant"]), Scaled(OTHERS[kind]), nn.Linear(WIDTH, 2))
    refused = refusals(model, "0", "1", "1.layer", "2")
    assert set(refused) == {"1"}
    assert "called again from the same state" in refused["1"]


@given(
    kinds=st.lists(st.sampled_from(sorted(REPEATED) + sorted(OTHERS)), min_size=1, max_size=5),
    wrapped=st.booleans(),
)
@settings(max_examples=at_most(200, 20), deadline=None)
def test_exactly_those_and_what_holds_them(kinds: list[str], wrapped: bool) -> None:
    parts: list[nn.Module] = [Scaled((REPEATED | OTHERS)[kind]) for kind in kinds]
    inner = nn.Sequential(*parts)
    model = nn.Sequential(nn.Sequential(inner), nn.Tanh()) if wrapped else nn.Sequential(inner)
    outside = ["0", "0.0"] if wrapped else ["0"]
    paths = [f"{outside[-1]}.{place}" for place in range(len(kinds))]
    refused = refusals(model, *outside, *paths)
    differing = {path for path, kind in zip(paths, kinds, strict=True) if kind in OTHERS}
    assert set(refused) == differing | (set(outside) if differing else set())


class Reading(nn.Module):
    """Reads what another module sets."""

    def __init__(self, holder: dict[str, float]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.read = lambda: holder["factor"]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x * self.read())
        return found


class Setting(nn.Module):
    """Sets what others read."""

    def __init__(self, holder: dict[str, float]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.set = lambda: holder.update(factor=holder["factor"] + 1)

    def forward(self, x: Tensor) -> Tensor:
        self.set()
        found: Tensor = self.layer(x)
        return found


def test_what_others_change_afterwards_is_seen() -> None:
    holder = {"factor": 1.0}
    model = nn.Sequential(Reading(holder), Setting(holder))
    refused = refusals(model, "0", "1")
    assert "same values" in refused["0"]
    assert "elsewhere" in refused["1"]
    assert holder == {"factor": 2.0}


class Writing(nn.Module):
    """Changes its input in place, or what was given to the one before."""

    def __init__(self, attribute: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.sums = torch.zeros(WIDTH) if attribute else None

    def forward(self, x: Tensor) -> Tensor:
        if self.sums is not None:
            found: Tensor = self.layer(x) * self.sums.add_(1).clone()
            return found
        found = self.layer(x.clone()) * 1
        x.mul_(2)
        return found


@pytest.mark.parametrize("attribute", [False, True])
def test_writing_in_place_is_refused(attribute: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing(attribute))
    refused = refusals(model, "0", "1")
    assert "in place" in refused["1"] or "inplace" in refused["1"]


class Twice(nn.Module):
    """Calls one module twice; its second call may do other things."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.inner = Scaled(factor)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.inner(x))
        return found


@pytest.mark.parametrize(("factor", "refused"), [(counted, set()), (closure(), {"0", "0.inner"})])
def test_every_call_of_a_module_counts(factor: Factor, refused: set[str]) -> None:
    assert set(refusals(nn.Sequential(Twice(factor)), "0", "0.inner")) == refused


class Raising(nn.Module):
    """Raises when it is called more often than the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.left = iter(range(1))

    def forward(self, x: Tensor) -> Tensor:
        next(self.left)
        found: Tensor = self.layer(x)
        return found


def test_an_error_of_the_second_run_is_the_reason() -> None:
    (reason,) = refusals(nn.Sequential(Raising()), "0").values()
    assert "StopIteration" in reason


def test_inputs_are_held_only_within_the_room() -> None:
    model = nn.Sequential(*(Scaled(REPEATED["constant"]) for _ in range(3)))
    input_bytes = 3 * WIDTH * 4
    assert refusals(model, "0", "1", "2", room_bytes=3 * input_bytes) == {}
    refused = refusals(model, "0", "1", "2", room_bytes=input_bytes)
    assert set(refused.values()) == {NO_ROOM}
    assert len(refused) == 2


def test_nothing_runs_again_after_the_deadline() -> None:
    model = nn.Sequential(Scaled(REPEATED["constant"]), Scaled(REPEATED["constant"]))
    assert refusals(model, "0", "1", deadline_s=0.0) == {"0": NO_TIME, "1": NO_TIME}


class Differentiating(nn.Module):
    """Takes a gradient within its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).tanh()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found: Tensor = out * slope
        return found


def test_a_module_that_differentiates_repeats_itself() -> None:
    assert refusals(nn.Sequential(Differentiating(), Differentiating()), "0", "1") == {}


def test_generators_and_forwards_are_as_before(one_seed: Iterator[None]) -> None:
    model = nn.Sequential(Scaled(REPEATED["torch"]))
    torch.manual_seed(0)
    model(torch.ones(3, WIDTH))
    expected = torch.rand(4)
    torch.manual_seed(0)
    refusals(model, "0")
    assert torch.equal(torch.rand(4), expected)
    assert "forward" not in vars(model[0])


class Appending(nn.Module):
    """Appends what it computes to a list: its argument, a global, or another module's."""

    def __init__(self, where: str, holder: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.where = where
        self.holder = [holder]  # no part

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        out: Tensor = self.layer(x)
        if self.where == "argument":
            found.append(out.square().mean())
        elif self.where == "global":
            LOSSES.append(out.square().mean())
        elif self.where == "module":
            self.holder[0].losses.append(out.square().mean())
        elif self.where == "buffer":
            self.holder[0].mean.mul_(0.9).add_(out.detach().mean())
        elif self.where == "parameter":
            self.holder[0].shift.data.mul_(0.9)
        return out


LOSSES: list[Tensor] = []


class Collecting(nn.Module):
    """Calls what appends, and empties every list before anything runs again."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.register_buffer("mean", torch.ones(()))
        self.shift = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.parts = nn.ModuleList(Appending(where, self) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        self.given: list[Tensor] = []
        for part in self.parts:
            x = part(x, self.given)
        found = x.sum() + sum(self.given + LOSSES + self.losses)
        LOSSES.clear()
        self.losses.clear()
        return found


@pytest.mark.parametrize(
    "where", ["nowhere", "argument", "global", "module", "buffer", "parameter"]
)
def test_a_trace_left_elsewhere_is_refused_and_none_in_arguments(where: str) -> None:
    model = Collecting(where)
    refused = refusals(model, "parts.0", "parts.1", "parts.0.layer")
    assert len(model.given) == (2 if where == "argument" else 0)
    assert LOSSES == model.losses == []
    assert {"parts.0", "parts.1"} <= set(refused) or where in ("nowhere", "argument")
    assert where not in ("nowhere", "argument") or refused == {}
    assert "parts.0.layer" not in refused or where in ("module", "buffer", "parameter")


@pytest.mark.parametrize("how", ["closure", "method", "global", "own forward"])
def test_a_hook_that_collects_is_not_fired_again(how: str) -> None:
    seen: list[Tensor] = []

    def collect(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        (LOSSES if how == "global" else seen).append(out)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "12"))
    inner = model[0][0]
    if how == "method":
        inner.register_forward_hook(Collector(seen).note)
    elif how == "own forward":
        own = inner.forward
        inner.forward = lambda x: (seen.append(x), own(x))[1]
    else:
        inner.register_forward_hook(collect)
    refused = refusals(model, "0", "1", "1.0")
    assert set(refused) == {"0"}
    assert len(seen or LOSSES) == 1
    LOSSES.clear()


class Collector:
    """Notes what a module returns."""

    def __init__(self, seen: list[Tensor]) -> None:
        self.seen = seen

    def note(self, _module: nn.Module, _inputs: Any, out: Tensor) -> None:
        self.seen.append(out)
