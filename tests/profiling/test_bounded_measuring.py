"""A step that only fused operators can hold is measured within the budget, too."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.core import garbage
from daf.memory import glibc, process_memory
from daf.profiling import profiler
from daf.step.microbatch import WeightedLoss

WORDS, LENGTH, WIDTH = 20_000, 768, 32
LOGITS_BYTES = LENGTH * WORDS * 4  # 61 MB; plain PyTorch's smallest step holds three of them

needs_peak = pytest.mark.skipif(
    not process_memory.peak_is_exact(), reason="this system keeps no resettable high-water mark"
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(words)))


def loss_fn(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


@needs_peak
def test_a_budget_below_pytorch_s_smallest_step_is_never_passed() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    glibc.return_free_memory()
    budget = process_memory.resident_bytes() + int(2.5 * LOGITS_BYTES)
    words = torch.randint(0, WORDS, (1, LENGTH))
    with daf.Session(model, optimizer, budget, tolerance=0) as session:
        for _ in range(3):
            session.step(words, loss_fn)
        assert session.peak_bytes <= budget
        assert session.plan is not None
        assert session.plan.policy.fused


TILE_ROWS, ROWS, FEATURES = 16, 64, 64
TILE_BYTES = 64 * 2**20  # of a whole tile's work; a small step's tile is as much smaller


def batch_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU())


def in_tiles(model: nn.Module, batch: Tensor) -> Tensor:
    """Works on a few rows at a time, as losses of large vocabularies do."""
    made = model(batch)
    for tile in made.detach().split(TILE_ROWS):
        torch.zeros(len(tile) * TILE_BYTES // TILE_ROWS, dtype=torch.uint8).add_(1)
    return made.square().mean()


@needs_peak
def test_a_batch_that_is_not_cut_is_measured_whole_before_it_is_refused() -> None:
    """From small steps it would need four tiles, of which it holds one."""
    model, batch = batch_statistics(), torch.randn(ROWS, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_tiles(model, batch).backward()
    optimizer.zero_grad()
    gc.collect()
    glibc.return_free_memory()
    budget = process_memory.resident_bytes() + int(1.75 * TILE_BYTES)
    with daf.Session(model, optimizer, budget, tolerance=0) as session:
        report = session.step(batch, in_tiles)
        assert session.split_refusal
        assert report.micro_batch == ROWS
        assert TILE_BYTES < session.peak_bytes <= budget
        assert session.predicted_peak_bytes <= budget


@needs_peak
def test_a_batch_that_is_not_cut_and_fits_as_it_is_is_not_measured_whole() -> None:
    model, batch, sizes = batch_statistics(), torch.randn(ROWS, FEATURES), []

    def counted(model: nn.Module, batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return in_tiles(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = process_memory.resident_bytes() + 16 * TILE_BYTES
    with daf.Session(model, optimizer, budget, tolerance=0) as session:
        session.step(batch, counted)
    assert sizes.count(ROWS) == 1


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers)


@needs_peak
@pytest.mark.parametrize("pairs_bytes", [0, 2**14])
def test_a_batch_that_surely_fits_is_measured_whole_only_if_it_grows_unevenly(
    pairs_bytes: int,
) -> None:
    """With ``pairs_bytes`` of every pair of examples, four times as much for twice as many."""
    model, batch = convolutions(), torch.randn(64, 3, 48, 48)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        made = model(batch)
        torch.zeros(len(batch) ** 2 * pairs_bytes, dtype=torch.uint8).add_(1)
        return made.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch[:8]).backward()
    optimizer.zero_grad()
    gc.collect()
    glibc.return_free_memory()
    budget = process_memory.resident_bytes() + 110 * 2**20  # plain: 140 and more
    with daf.Session(model, optimizer, budget, operators="pytorch") as session:
        session.step(batch, loss_of)
        assert session.split_refusal
        assert session.peak_bytes <= budget
        assert session.profile is not None
        assert session.profile.grows_evenly is not bool(pairs_bytes)


@needs_peak
@pytest.mark.parametrize(("long_ms", "sizes"), [(0.0, [16]), (math.inf, [8, 16])])
def test_of_a_batch_that_is_not_cut_a_long_step_is_timed_at_one_size(
    monkeypatch: pytest.MonkeyPatch, long_ms: float, sizes: list[int]
) -> None:
    monkeypatch.setattr(profiler, "LONG_MS", long_ms)
    model, batch = convolutions(), torch.randn(64, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with daf.Session(model, optimizer, "8GB", operators="pytorch") as session:
        session.prepare(batch, lambda model, batch: model(batch).square().mean())
        assert session.split_refusal
        assert session.profile is not None
        assert [examples for examples, _ in session.profile.micro_batch_ms] == sizes


@cache  # what a loss function refers to would be put back
def read_once(folder: Path, count: int) -> np.ndarray:
    (folder / str(count)).write_bytes(bytes(32 * 2**20))
    return np.memmap(folder / str(count), mode="r")


@needs_peak
def test_code_that_a_size_is_the_first_to_read_does_not_seem_to_grow_with_it(
    tmp_path: Path,
) -> None:
    """As pages of a file: other kernels run at other sizes, and their code stays."""
    before = process_memory.mapped_bytes()
    assert read_once(tmp_path, 0).max() == 0
    if process_memory.mapped_bytes() < before + 2**24:
        pytest.skip("this file system's pages are counted otherwise")

    def reading(model: nn.Module, batch: Tensor) -> Tensor:
        assert read_once(tmp_path, len(batch)).max() == 0
        return model(batch).square().mean()

    model, batch = batch_statistics(), torch.randn(ROWS, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with daf.Session(model, optimizer, "8GB", tolerance=0, cache=False) as session:
        session.prepare(batch, reading)
        assert session.profile is not None
        assert read_once.cache_info().currsize > 2
        assert session.profile.passing_bytes_at(ROWS) < 16 * 2**20
    read_once.cache_clear()


def test_a_step_that_is_measured_again_holds_nothing_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    once, read_loss = profiler.Profiler._observe_once, profiler.read_loss

    def noted(own: profiler.Profiler, *arguments: Any) -> Any:
        alive.append(sum(each() is not None for each in losses))
        return once(own, *arguments)

    def noting(*arguments: Any) -> WeightedLoss:
        loss = read_loss(*arguments)
        losses.append(weakref.ref(loss.total))
        return loss

    monkeypatch.setattr(profiler, "MOST_READ_BYTES", -1)  # each step is, whatever code it read
    monkeypatch.setattr(profiler.Profiler, "_observe_once", noted)
    monkeypatch.setattr(profiler, "read_loss", noting)  # what loss functions change is put back
    model, words = Model(), torch.randint(0, WORDS, (1, LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with daf.Session(model, optimizer, "8GB", tolerance=0, cache=False) as session:
        session.prepare(words, loss_fn)
    assert len(alive) >= 3
    assert len(losses) >= 3
    assert not any(alive)


class Left:
    """Garbage of others: a cycle that holds a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.held, self.itself = torch.ones(nbytes, dtype=torch.uint8), self


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program that has not told Python what lives for good; nor does Python look itself."""
    was_frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.disable()
    monkeypatch.setattr(garbage._Frozen, "by_program", False)
    yield
    gc.enable()
    if was_frozen:
        gc.freeze()


@needs_peak
@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("is_tight", [False, True])
def test_what_others_left_is_freed_where_the_budget_needs_it(*, is_tight: bool) -> None:
    """A look at all there is takes as long as the measuring of a small network."""
    model, batch = convolutions(), torch.randn(64, 3, 48, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    loss_of(model, batch[:8]).backward()
    optimizer.zero_grad()
    cycle = Left(2**27)
    gc.collect()
    glibc.return_free_memory()
    left = weakref.ref(cycle)
    del cycle
    budget = process_memory.resident_bytes() + (20 if is_tight else 800) * 2**20
    with daf.Session(model, optimizer, budget) as session:
        session.step(batch, loss_of)
        assert session.peak_bytes <= budget
    assert (left() is None) == is_tight
