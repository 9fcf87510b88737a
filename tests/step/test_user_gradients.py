"""Gradients that the user accumulated are added to; those that a session left are cleared."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from daf import Session, compress
from daf.core.errors import AccumulatedGradientError
from daf.memory import process_memory
from daf.profiling.split_choice import LEADS_BEYOND
from daf.step.other_leaves import OtherLeaves
from daf.step.user_gradients import UserGradients

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


Made = tuple[nn.Module, list[Tensor], Callable[[nn.Module, Batch], Any]]


def weights_of_two_terms() -> Made:
    """Uncertainty weighting: the loss has weights of its own, which no module holds."""
    held = SimpleNamespace(logs=[torch.zeros(2, requires_grad=True)])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        made, (logs,) = model(batch[0]), held.logs
        terms = torch.stack([F.cross_entropy(made, batch[1]), made.square().mean()])
        return (terms * torch.exp(-logs) + logs).sum()

    return mlp(), held.logs, loss


def biases_of_a_sum() -> Made:
    """A sum and its weight, divided once all parts are there."""
    bias = torch.zeros(5, requires_grad=True)

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(model(batch[0]) + bias, batch[1], reduction="none")
        weights = 0.1 + batch[0][:, 0].abs()
        return (each * weights).sum(), weights.sum()

    return mlp(), [bias], loss


def criterion_of_its_own() -> Made:
    head = nn.Linear(5, 5)
    return mlp(), [*head.parameters()], lambda model, b: F.cross_entropy(head(model(b[0])), b[1])


def by_hand(loss: Any) -> Tensor:
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def gradients_by(step: str, make: Callable[[], Made], *, is_stepped: bool) -> list[list[Tensor]]:
    torch.manual_seed(3)
    (model, others, loss), found = make(), []
    stepped = [*model.parameters(), *(others if is_stepped else ())]
    optimizer = torch.optim.SGD(stepped, lr=0.1)
    batches = [images(16) for _ in range(4)]
    budget = None if step == "unbounded" else process_memory.resident_bytes() + 10**9
    session = Session(model, optimizer, budget, cache=False, tolerance=None if not budget else 0)
    with session:
        for batch in batches:
            if step == "plain":
                optimizer.zero_grad()
                by_hand(loss(model, batch)).backward()
                optimizer.step()
            elif step == "cut":
                session.prepare(batch, loss)
                assert not session.split_refusal
                parts = session.plan.policy, 5
                session.plan = type(session.plan)(*parts, predicted_peak_bytes=0)
                assert session.step(batch, loss).micro_batch == 5
            else:
                session.step(batch, loss)
            found.append([each.grad.clone() for each in others if each.grad is not None])
            if not is_stepped:  # then their gradients are the user's
                for each in others:
                    each.grad = None
    return found


@pytest.mark.parametrize("is_stepped", [True, False])
@pytest.mark.parametrize("step", ["unbounded", "bounded", "cut"])
@pytest.mark.parametrize("make", [weights_of_two_terms, biases_of_a_sum, criterion_of_its_own])
def test_what_a_loss_trains_beside_the_model_gets_plains_gradients(
    make: Callable[[], Made], step: str, *, is_stepped: bool
) -> None:
    """Measuring leaves none in them, each step replaces the last one's, a sum is divided."""
    expected = gradients_by("plain", make, is_stepped=is_stepped)
    found = gradients_by(step, make, is_stepped=is_stepped)
    assert [len(each) for each in found] == [len(each) for each in expected] != [0] * 4
    torch.testing.assert_close(found, expected)


def test_a_batch_that_asks_for_its_gradient_gets_plains() -> None:
    model, batch = mlp(), images()
    inputs = batch[0].requires_grad_()
    mean(model, batch).backward()
    expected, inputs.grad = inputs.grad, None
    budget = process_memory.resident_bytes() + 10**9
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), budget, tolerance=0) as bound:
        bound.step((inputs, batch[1]), mean)
    torch.testing.assert_close(inputs.grad, expected)


def test_a_step_that_is_tried_again_begins_without_the_first_tries_gradients() -> None:
    model, aside = nn.Linear(2, 2), torch.zeros(2, requires_grad=True)
    aside.grad = torch.ones(2)
    users = UserGradients(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def tried() -> None:
        loss = (model(torch.ones(2)) * aside).sum() + 3 * aside.sum()
        users.others.set_aside(loss)
        loss.backward()

    with users.set_aside([*model.parameters()], [], leaves_to_user=False):
        tried()
        users.clear()
        assert aside.grad is None
        tried()
    assert torch.equal(aside.grad, 1 + model(torch.ones(2)) + 3)
    held = aside.grad
    with suppress(KeyError), users.set_aside([*model.parameters()], [], leaves_to_user=False):
        tried()
        raise KeyError
    assert aside.grad is held


def test_leaves_that_a_loss_makes_live_no_longer_than_its_graph() -> None:
    others, noise = OtherLeaves(), torch.ones(4, requires_grad=True)
    loss, left = noise.square().sum(), weakref.ref(noise)
    others.set_aside(loss)
    assert [leaf for leaf, _ in others.taken()] == [noise]
    del noise, loss
    assert left() is None
    assert others.taken() == []


@pytest.mark.parametrize("where", ["batch", "closure"])
def test_a_graph_that_was_there_before_is_gone_through_once(where: str) -> None:
    encoder, model, (inputs, labels) = nn.Linear(6, 6), mlp(), images()
    twins = copy.deepcopy((encoder, model))
    mean(twins[1], (twins[0](inputs), labels)).backward()
    made = encoder(inputs)
    budget = process_memory.resident_bytes() + 10**9
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), budget, tolerance=0) as bound:
        if where == "batch":
            bound.backward((made, labels), mean)
        else:
            bound.backward(labels, lambda model, labels: mean(model, (made, labels)))
        assert where == "closure" or bound.split_refusal == LEADS_BEYOND
    for one, other in zip((encoder, model), twins, strict=True):
        torch.testing.assert_close(gradients_of(one), gradients_of(other))


@pytest.mark.parametrize("is_functional", [False, True])
def test_compress_measures_models_whose_weights_have_a_graph(*, is_functional: bool) -> None:
    model, (inputs, labels) = nn.Linear(6, 5), images()
    if is_functional:
        own = {"weight": torch.randn(5, 6, requires_grad=True), "bias": torch.zeros(5)}
        made = {"weight": own["weight"] * 2, "bias": own["bias"]}
    else:
        parametrizations.weight_norm(model)
    twin = copy.deepcopy(model)
    budget = process_memory.resident_bytes() + 10**9
    with (door := compress(model, budget=budget, tolerance=0)), parametrize.cached():
        given = made if is_functional else {}
        loss = F.cross_entropy(torch.func.functional_call(model, given, inputs), labels)
    loss.backward()
    door.close()
    if is_functional:
        logits = inputs @ own["weight"].T * 2
        (expected,) = torch.autograd.grad(F.cross_entropy(logits, labels), own["weight"])
        torch.testing.assert_close(own["weight"].grad, expected)
    else:
        mean(twin, (inputs, labels)).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(twin))


def test_sessions_train_where_numbers_are_doubles_unless_told() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model, batch = mlp(), images()
        twin, budget = copy.deepcopy(model), process_memory.resident_bytes() + 10**9
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Session(model, optimizer, budget, tolerance=0, cache=False) as session:
            session.step(batch, mean)
    finally:
        torch.set_default_dtype(torch.float32)
    mean(twin, batch).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(twin))
