"""Parts of a batch join with the weights that loss operators divide by; scaled losses are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler

from daf import Session
from daf.core.errors import SplitError
from daf.step.loss_weights import LossWeights, PartWeights, Weighing, scale_watched
from daf.step.microbatch import read_loss

CLASSES, EXAMPLES, TOKENS = 5, 6, 4
IGNORED = -100


@st.composite
def labels(draw: st.DrawFn) -> Tensor:
    """Labels of which any number is ignored, but not all."""
    numbers = st.sampled_from([IGNORED, *range(CLASSES)])
    found = draw(st.lists(numbers, min_size=EXAMPLES * TOKENS, max_size=EXAMPLES * TOKENS))
    found[draw(st.integers(0, len(found) - 1))] = 0
    return torch.tensor(found).reshape(EXAMPLES, TOKENS)


def loss_of(scores: Tensor, target: Tensor, how: str, weight: Tensor | None) -> Tensor:
    if how == "cross_entropy":
        return F.cross_entropy(scores.transpose(1, 2), target, weight=weight)
    flat, wanted = scores.flatten(0, 1), target.flatten()
    if how == "module":
        return nn.CrossEntropyLoss(weight=weight)(flat, wanted)
    return F.nll_loss(F.log_softmax(flat, -1), wanted, weight=weight)


@given(
    target=labels(),
    how=st.sampled_from(["cross_entropy", "nll_loss", "module"]),
    is_weighted=st.booleans(),
    size=st.integers(1, EXAMPLES),
)
@settings(max_examples=60, deadline=None)
def test_parts_join_to_the_mean_over_what_counts(
    target: Tensor, how: str, is_weighted: bool, size: int
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(EXAMPLES, TOKENS, CLASSES, dtype=torch.float64)
    weight = torch.linspace(0.5, 3.0, CLASSES, dtype=torch.float64) if is_weighted else None
    whole, cut = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    expected = loss_of(whole, target, how, weight)
    expected.backward()
    parts = PartWeights(Weighing.LOSS)
    total, weights = 0.0, 0.0
    for start in range(0, EXAMPLES, size):
        with LossWeights() as operators:
            loss = loss_of(cut[start : start + size], target[start : start + size], how, weight)
        found = parts.weighed(read_loss(loss, size), operators)
        assert found.total.isfinite()
        found.total.backward()
        total, weights = total + found.total.item(), weights + float(found.weight)
    parts.check()
    assert total / weights == pytest.approx(expected.item(), rel=1e-6)
    assert cut.grad is not None
    torch.testing.assert_close(cut.grad / weights, whole.grad, rtol=1e-6, atol=1e-9)


def test_parts_whose_operators_divide_by_several_numbers_are_refused_before_the_update() -> None:
    parts = PartWeights(Weighing.LOSS)
    scores = torch.randn(4, CLASSES, requires_grad=True)
    with LossWeights() as operators:
        one = F.cross_entropy(scores, torch.tensor([1, 2, IGNORED, 3]))
        other = F.cross_entropy(scores, torch.tensor([1, 2, 0, 3]))
    parts.weighed(read_loss(one + other, 4), operators)
    with pytest.raises(SplitError, match=r"divide by \[3.0, 4.0\]"):
        parts.check()


def test_parts_with_other_shares_of_labels_do_not_join_by_examples() -> None:
    parts = PartWeights(Weighing.EXAMPLES)
    for ignored in (0, 2):
        target = torch.tensor([IGNORED] * ignored + [1] * (4 - ignored))
        with LossWeights() as operators:
            loss = F.cross_entropy(torch.randn(4, CLASSES, requires_grad=True), target)
        parts.weighed(read_loss(loss, 4), operators)
    with pytest.raises(SplitError, match="different shares of labels that count"):
        parts.check()


def scaled_steps(micro_batch: int, scaler: GradScaler, unscales: bool) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if unscales:
        optimizer.register_step_pre_hook(lambda *_: scaler.unscale_(optimizer))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scaled: Tensor = scaler.scale(F.cross_entropy(model(batch[0]), batch[1]))
        return scaled

    batch = torch.randn(8, 6), torch.randint(0, CLASSES, (8,))
    with Session(model, optimizer, None) as session:
        session.plan = replace(session.prepare(batch, loss_fn), micro_batch=micro_batch)
        report = session.step(batch, loss_fn)
        assert report.micro_batch == micro_batch
    return report, [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("micro_batch", [8, 3])
def test_a_scaled_loss_is_reported_unscaled(micro_batch: int) -> None:
    scale = GradScaler.scale
    plain, expected = scaled_steps(micro_batch, GradScaler("cpu", enabled=False), False)
    found, parameters = scaled_steps(micro_batch, GradScaler("cpu", init_scale=2.0**12), True)
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert GradScaler.scale is scale


def test_watches_nest_and_leave_the_class_as_it_was() -> None:
    before, scaler, loss = GradScaler.scale, GradScaler("cpu", init_scale=8.0), torch.ones(())
    with scale_watched() as outer:
        with scale_watched() as inner:
            assert float(scaler.scale(loss)) == 8.0
        assert GradScaler.scale is not before
    assert inner.factor is not None
    assert float(inner.factor) == 8.0
    assert outer.factor is None
    assert GradScaler.scale is before


class Doubled(torch.autograd.Function):
    """Reads its input where no function mode sees it."""

    @staticmethod
    def forward(_: Any, given: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return given * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def scalings_of(loss_of: Any) -> list[float]:
    rows = torch.ones(6, 2, requires_grad=True)
    with LossWeights() as operators:
        loss = loss_of(rows)
    operators.leave_out_beside(loss)
    return [float(each) for each in operators.scalings]


def test_numbers_of_results_that_nobody_reads_decide_nothing() -> None:
    def loss_of(rows: Tensor) -> Tensor:
        rows[:5].sum().div(torch.tensor(5.0))
        return rows.mean()

    assert scalings_of(loss_of) == [12.0]


@pytest.mark.parametrize("read", [Tensor.detach, Tensor.item, Doubled.apply])
def test_numbers_of_results_that_are_read_in_any_way_are_kept(read: Any) -> None:
    def loss_of(rows: Tensor) -> Tensor:
        return rows.sum() - read(rows[:5].mean())

    assert scalings_of(loss_of) == [10.0]


def test_a_loss_that_is_returned_with_its_weight_keeps_its_numbers() -> None:
    assert scalings_of(lambda rows: (rows.mean(), torch.tensor(3.0))) == [12.0]
