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


GENERATOR, DISCRIMINATOR = nn.Linear(6, 6), nn.Linear(6, 1)


def discriminated(model: nn.Module, batch: Batch) -> Tensor:
    return F.softplus(-model(batch[0])).mean() + F.softplus(model(batch[1])).mean()


def fooled(model: nn.Module, batch: Tensor) -> Tensor:
    return F.softplus(-DISCRIMINATOR(model(batch))).mean()


def test_measuring_leaves_the_gradients_of_models_that_a_loss_names() -> None:
    DISCRIMINATOR.zero_grad()
    discriminated(DISCRIMINATOR, (torch.randn(8, 6), torch.randn(8, 6))).backward()
    before = gradients_of(DISCRIMINATOR)
    budget = process_memory.resident_bytes() + 10**9
    optimizer = torch.optim.SGD(GENERATOR.parameters(), lr=0.1)
    with Session(GENERATOR, optimizer, budget, cache=False) as session:
        session.prepare(torch.randn(8, 6), fooled)
    for one, other in zip(gradients_of(DISCRIMINATOR), before, strict=True):
        assert torch.equal(one, other)


def test_sessions_of_a_generator_and_a_discriminator_take_turns() -> None:
    plain = copy.deepcopy((GENERATOR, DISCRIMINATOR))
    sides, real = (GENERATOR, DISCRIMINATOR), torch.randn(8, 6)
    DISCRIMINATOR.zero_grad()
    optimizers, others = (
        [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for models in (sides, plain)
    )
    budget = process_memory.resident_bytes() + 10**9
    options = {"tolerance": 0, "cache": False}
    with (
        Session(GENERATOR, optimizers[0], budget, **options) as generating,
        Session(DISCRIMINATOR, optimizers[1], budget, **options) as telling,
    ):
        for _ in range(3):
            fake = GENERATOR(real).detach()
            telling.step((real, fake), discriminated)
            generating.step(real, fooled)
            others[1].zero_grad()
            discriminated(plain[1], (real, plain[0](real).detach())).backward()
            others[1].step()
            others[0].zero_grad()
            F.softplus(-plain[1](plain[0](real))).mean().backward()
            others[0].step()
    for model, twin in zip(sides, plain, strict=True):
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other)
