"""Batches that grow, sorted or shuffled: few of them are measured, and none is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf import Session
from daf.memory import process_memory
from daf.session.step_profiles import StepProfiles

WORDS, EXAMPLES = 50, 4


@dataclass
class Measured:
    """The lengths of the batches that profiles were made of."""

    lengths: list[int] = field(default_factory=list)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found, measure = Measured(), StepProfiles.measure

    def noted(self: StepProfiles, context: Any, *rest: Any, **options: Any) -> Any:
        found.lengths.append(context.batch[0].shape[1])
        return measure(self, context, *rest, **options)

    monkeypatch.setattr(StepProfiles, "measure", noted)
    return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.Embedding(WORDS, 32), layer, nn.Linear(32, WORDS))


def word_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def of_length(length: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (2, EXAMPLES, length))
    return words[0], words[1]


def lengths(order: str, count: int) -> list[int]:
    found = random.Random(1).sample(range(16, 400), count)
    return sorted(found) if order == "sorted" else found


@pytest.mark.parametrize("order", ["sorted", pytest.param("shuffled", marks=pytest.mark.thorough)])
def test_lengths_take_few_profiles_in_any_order(order: str, measured: Measured) -> None:
    ours, plain = model(), model()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (ours, plain)]
    budget = process_memory.resident_bytes() + 200 * 2**20
    with Session(ours, optimizers[0], budget, tolerance=0) as session:
        for length in lengths(order, 60):
            batch = of_length(length)
            report = session.step(batch, word_loss)
            loss = word_loss(plain, batch)
            loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            assert report.loss == pytest.approx(loss.item(), rel=1e-4)
        assert session.peak_bytes <= budget
    assert len(measured.lengths) <= 8, measured.lengths


def test_more_examples_than_measured_take_no_other_profile(measured: Measured) -> None:
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    budget = process_memory.resident_bytes() + 200 * 2**20
    with Session(ours, optimizer, budget, tolerance=0) as session:
        for examples in range(2, 9):
            words = torch.randint(0, WORDS, (2, examples, 32))
            session.step((words[0], words[1]), word_loss)
    assert measured.lengths == [32]


def test_an_example_far_larger_than_any_is_measured(measured: Measured) -> None:
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    budget = process_memory.resident_bytes() + 200 * 2**20
    with Session(ours, optimizer, budget, tolerance=0) as session:
        for length in (32, 40, 120):
            session.step(of_length(length), word_loss)
    assert measured.lengths == [32, 120]
