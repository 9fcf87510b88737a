"""Gradients that the user accumulated are added to; those that a session left are cleared."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf import Session
from daf.core.errors import AccumulatedGradientError
from daf.memory import process_memory

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def images(size: int = 12) -> Batch:
    return torch.randn(size, 6), torch.randint(0, 5, (size,))


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("is_bounded", [False, True])
def test_gradients_that_the_user_accumulated_are_added_to(is_bounded: bool) -> None:
    bounded = process_memory.resident_bytes() + 10**9 if is_bounded else None
    model, batch = mlp(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    for part in (images(4), batch):
        mean(twin, part).backward()
        if part is not batch:
            mean(model, part).backward()
    with Session(model, optimizer, bounded, tolerance=0) as session:
        session.step(batch, mean)
        torch.testing.assert_close(gradients_of(model), gradients_of(twin))
        session.step(batch, mean)  # what the step before left is not the user's
        plain = copy.deepcopy(model)
        plain.zero_grad()
        mean(plain, batch).backward()
        session.step(batch, mean)
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def test_a_step_holds_nothing_of_what_the_step_before_left() -> None:
    model, batch, left, found = mlp(), images(), list[weakref.ref[Tensor]](), list[bool]()

    def noted(model: nn.Module, batch: Batch) -> Tensor:
        found.append(any(each() is not None for each in left))
        return mean(model, batch)

    with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), None) as session:
        session.step(batch, noted)
        left += [weakref.ref(each.grad) for each in model.parameters() if each.grad is not None]
        found.clear()
        session.step(batch, noted)
    assert len(left) == 4
    assert found == [False]


def test_another_session_clears_what_the_first_one_left() -> None:
    model, batch = mlp(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Session(model, optimizer, None) as session:
        session.step(batch, mean)
    expected = gradients_of(model)
    with Session(model, optimizer, None) as session:
        session.step(batch, mean)
    torch.testing.assert_close(gradients_of(model), expected)


def test_gradients_mixed_with_those_of_the_step_before_are_refused() -> None:
    model, batch = mlp(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Session(model, optimizer, None) as session:
        session.step(batch, mean)
        mean(model, batch).backward()
        held = gradients_of(model)
        with pytest.raises(AccumulatedGradientError, match=r"call optimizer\.zero_grad"):
            session.step(batch, mean)
        assert all(map(torch.equal, gradients_of(model), held))
        optimizer.zero_grad(set_to_none=False)
        session.step(batch, mean)
