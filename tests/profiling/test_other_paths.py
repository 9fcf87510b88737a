"""What a step computes otherwise than those that were proven is proven too, or not cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf import Session
from daf.core.step_report import StepReport
from daf.memory import process_memory

Batch = tuple[Tensor, ...]


@pytest.fixture
def budget() -> int:
    return process_memory.resident_bytes() + 10**9


def mlp(classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, classes))


def images() -> Batch:
    return torch.randn(12, 6), torch.randint(0, 5, (12,))


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def still(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def plain_gradients(loss: Any, model: nn.Module, batch: Batch) -> tuple[float, list[Tensor]]:
    value = loss(model, batch)
    return value.item(), list(torch.autograd.grad(value, list(model.parameters())))


def in_micro_batches(session: Session, batch: Batch, loss: Any, examples: int) -> StepReport:
    session.plan = replace(session.prepare(batch, loss), micro_batch=examples)
    return session.step(batch, loss)


@pytest.mark.parametrize("adds_up", [True, False])
def test_a_path_that_opens_later_is_proven_when_it_opens(adds_up: bool, budget: int) -> None:
    """A penalty every third step: of each example, or of the batch's mean."""
    model, batch, step = mlp(), images(), 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if step % 3 != 2:
            return mean(model, batch)
        logits = model(batch[0])
        part = logits.square().mean() if adds_up else logits.mean(0).square().sum()
        return F.cross_entropy(logits, batch[1]) + part

    with Session(model, still(model), budget, tolerance=0) as session:
        in_micro_batches(session, batch, loss, 4)
        for step in range(7):
            report = session.step(batch, loss)
            expected, gradients = plain_gradients(loss, model, batch)
            assert report.loss == pytest.approx(expected, rel=1e-5)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
            is_cut = adds_up or step < 2
            assert report.micro_batch == (4 if is_cut else len(batch[0]))
            session.optimizer.zero_grad()


def ungraded_share(counted: Tensor) -> Tensor:
    with torch.no_grad():
        return counted / counted.sum()


MASKED_MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by a tensor": lambda losses, counted: (losses * counted).sum() / counted.sum(),
    "by a number": lambda losses, counted: (losses * counted).sum() / int(counted.sum()),
    "by a factor": lambda losses, counted: (losses * counted).sum() * (1 / counted.sum()),
    "by a factor of each": lambda losses, counted: (losses * (1 / counted.sum())) @ counted,
    "by weights of sum one": lambda losses, counted: losses @ (counted / counted.sum()),
    "of numbers alone": lambda losses, counted: losses.where(counted > 0, torch.nan).nanmean(),
    "of the selected": lambda losses, counted: losses[counted > 0].mean(),
    "of the selected by name": lambda losses, counted: torch.mean(input=losses[counted > 0]),
    "of the selected, by columns": lambda losses, counted: (
        losses[counted > 0][:, None].expand(-1, 3).mean(0).sum()
    ),
    "by a tensor before the sum": lambda losses, counted: (losses * counted / counted.sum()).sum(),
    "by weights without gradients": lambda losses, counted: losses @ ungraded_share(counted),
    "by a loss of the selected": lambda losses, counted: F.l1_loss(
        losses[counted > 0], torch.zeros(int(counted.sum()))
    ),
    "by a divergence of the selected": lambda losses, counted: F.kl_div(
        -losses[counted > 0], torch.ones(int(counted.sum()))
    ),
}


@pytest.mark.filterwarnings("ignore:reduction")  # PyTorch's own of kl_div
@pytest.mark.parametrize("kind", MASKED_MEANS)
def test_a_mask_that_is_uneven_later_is_no_mean_over_examples(kind: str, budget: int) -> None:
    """Parts join by what the loss divides by where that is a tensor; else the batch is whole."""
    model, (x, labels) = mlp(), images()
    counted = torch.ones(12)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return MASKED_MEANS[kind](losses, batch[2])

    with Session(model, still(model), budget, tolerance=0) as session:
        assert in_micro_batches(session, (x, labels, counted), loss, 4).micro_batch == 4
        counted[5:8] = 0.0
        session.optimizer.zero_grad()
        report = session.step((x, labels, counted), loss)
        expected, gradients = plain_gradients(loss, model, (x, labels, counted))
        assert report.loss == pytest.approx(expected, rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
        assert report.micro_batch == (4 if kind == "by a tensor" else 12)


def one_by_one(losses: Tensor, counted: Tensor) -> Tensor:
    """Each example has a mean of its own, of which there are as many as examples."""
    each = [
        (loss * (1.0 + count)) / (1.0 + count) for loss, count in zip(losses, counted, strict=True)
    ]
    return torch.stack(each).mean()


def beside_a_metric(losses: Tensor, counted: Tensor) -> Tensor:
    """What is only logged decides nothing: shares, means of the selected, medians."""
    with torch.no_grad():
        logged = losses[counted > 0].mean(), (losses < 1).sum() / counted.sum()
    assert len({*map(float, (*logged, losses.detach().median(), losses.detach().msort()[-1]))})
    return losses.mean()


def beside_a_number_read(losses: Tensor, counted: Tensor) -> Tensor:
    """A part may have nothing right, which is read into Python, and is divided by nothing."""
    right = (counted < 0.5).sum().item()
    assert right >= 0
    return torch.mean(dim=0, input=losses)


EVEN_MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one by one": one_by_one,
    "beside a metric": beside_a_metric,
    "beside a number read": beside_a_number_read,
    "by complex numbers": lambda losses, _: (losses.mean() * 1j / (1 + 1j)).imag * 2,
    "by nothing beside": lambda losses, _: torch.mul(losses.mean(), torch.tensor(2.0), out=None),
    "over a number of steps": lambda losses, _: losses.mean() / 4,
}


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("kind", EVEN_MEANS)
@pytest.mark.parametrize("examples", [12, 14])  # parts of one size, and an uneven last one
def test_what_does_not_weigh_a_loss_keeps_no_batch_whole(
    examples: int, kind: str, budget: int
) -> None:
    model, x, labels = mlp(), torch.randn(examples, 6), torch.randint(0, 5, (examples,))
    counted = torch.ones(examples)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return EVEN_MEANS[kind](losses, batch[2])

    with Session(model, still(model), budget, tolerance=0) as session:
        assert in_micro_batches(session, (x, labels, counted), loss, 4).micro_batch == 4
        counted[5:8] = 0.0
        session.optimizer.zero_grad()
        assert session.step((x, labels, counted), loss).micro_batch == 4
        _, gradients = plain_gradients(loss, model, (x, labels, counted))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_part_with_nothing_to_divide_by_is_not_cut_wrongly(budget: int) -> None:
    """Two means over labels that count, of which some parts have none."""
    model = mlp(classes=10)
    x, labels = torch.randn(12, 6), torch.randint(0, 5, (2, 12))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        starts, ends = model(batch[0]).chunk(2, dim=1)
        return F.cross_entropy(starts, batch[1]) + F.cross_entropy(ends, batch[2])

    with Session(model, still(model), budget, tolerance=0) as session:
        assert in_micro_batches(session, (x, *labels), loss, 3).micro_batch == 3
        labels[1, 3:9] = -100
        report = session.step((x, *labels), loss)
        expected, _ = plain_gradients(loss, model, (x, *labels))
        assert report.micro_batch == 12
        assert report.loss == pytest.approx(expected, rel=1e-5)


def over_positives(scores: Tensor, labels: Tensor) -> Tensor:
    """As detectors do: all examples count, and only the positive ones are divided by."""
    is_positive = (labels > 3).float()
    each = F.binary_cross_entropy_with_logits(scores[:, 0], is_positive, reduction="none")
    return each.sum() / is_positive.sum().clamp(min=1)


def over_positives_at_once(scores: Tensor, labels: Tensor) -> Tensor:
    is_positive = (labels > 3).float()
    total = F.binary_cross_entropy_with_logits(scores[:, 0], is_positive, reduction="sum")
    return total / torch.maximum(is_positive.sum(), torch.ones(()))


def over_labelled(scores: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(scores, labels, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def over_a_number_of_labelled(scores: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(scores, labels, reduction="sum")
    return total / max(1, int((labels != -100).sum()))


def over_labelled_by_item(scores: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(scores, labels, reduction="sum")
    return total / max(1.0, (labels != -100).sum().item())


def of_the_selected(scores: Tensor, labels: Tensor) -> Tensor:
    is_selected = labels != -100
    return F.cross_entropy(scores, labels, reduction="none")[is_selected].mean()


def of_the_selected_squared(scores: Tensor, labels: Tensor) -> Tensor:
    is_selected = labels != -100
    return F.mse_loss(scores[is_selected, 0], labels[is_selected].float())


COUNTED = [
    *(over_positives, over_positives_at_once, over_labelled, over_a_number_of_labelled),
    *(over_labelled_by_item, of_the_selected, of_the_selected_squared),
]


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("examples", [1, 2, 4])
@pytest.mark.parametrize("is_even_at_first", [True, False])
def test_a_count_that_is_one_at_least_is_not_taken_for_a_number(
    kind: Callable[[Tensor, Tensor], Tensor], examples: int, is_even_at_first: bool, budget: int
) -> None:
    """Of two examples that show most, one counts and one does not: their mean is their sum."""
    model, x = mlp(), torch.randn(12, 6)
    even, labels = torch.randint(0, 5, (12,)), torch.randint(0, 5, (12,))
    if kind in (over_positives, over_positives_at_once):
        even, labels = torch.full((12,), 4), torch.tensor([4, 0, 0, 4, 0, 0, 4, 0, 0, 4, 0, 4])
    else:
        labels[[0, 1, 2, 3, 6, 9]] = -100

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return kind(model(batch[0]), batch[1])

    batches = [(x, even if is_even_at_first else labels), (x, labels), (x, labels)]
    with Session(model, still(model), budget, tolerance=0) as session:
        plan = session.prepare(batches[0], loss)
        for batch in batches:
            if not session.split_refusal:
                session.plan = replace(plan, micro_batch=examples)
            session.optimizer.zero_grad()
            report = session.step(batch, loss)
            expected, gradients = plain_gradients(loss, model, batch)
            assert report.loss == pytest.approx(expected, rel=1e-5)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("has_ignored", [True, False])
def test_a_sum_is_cut_still(has_ignored: bool, budget: int) -> None:
    model, (x, labels) = mlp(), images()
    if has_ignored:
        labels[::3] = -100

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    with Session(model, still(model), budget, tolerance=0) as session:
        report = in_micro_batches(session, (x, labels), loss, 4)
        expected, gradients = plain_gradients(loss, model, (x, labels))
        assert report.micro_batch == 4
        assert report.loss == pytest.approx(expected, rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


WORTH = {"web": 1.0, "book": 5.0}
Rows = Callable[[list[str]], Any]
ROWS: dict[str, Rows] = {
    "words": lambda names: names,
    "numbers": lambda names: tuple(WORTH[each] for each in names),
    "mappings": lambda names: [{"name": each, "worth": WORTH[each]} for each in names],
    "an array": lambda names: np.array([WORTH[each] for each in names]),
    "a nest": lambda names: {"of": (["head"], [(each, 0) for each in names])},
}


def worth_of(rows: Any) -> list[float]:
    rows = rows["of"][1] if isinstance(rows, dict) else rows
    names = (row["name"] if isinstance(row, dict) else row for row in rows)
    names = (name[0] if isinstance(name, tuple) else name for name in names)
    return [WORTH[name] if isinstance(name, str) else float(name) for name in names]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("examples", [1, 4, 5])
def test_rows_without_tensors_are_cut_with_the_examples(
    kind: str, examples: int, budget: int
) -> None:
    """The first two are alike, so that wrong pairs would have shown nothing."""
    model, (x, labels) = mlp(), images()
    rows = ROWS[kind](["web"] * 6 + ["book"] * 6)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        found = worth_of(batch["rows"])
        assert len(found) >= len(losses)
        return sum(
            (worth * each for worth, each in zip(found, losses, strict=False)), torch.zeros(())
        ) / len(losses)

    batch = {"x": x, "y": labels, "rows": rows}
    with Session(model, still(model), budget, tolerance=0) as session:
        report = in_micro_batches(session, batch, loss, examples)  # type: ignore[arg-type]
        expected, gradients = plain_gradients(loss, model, batch)  # type: ignore[arg-type]
        assert report.micro_batch == examples
        assert report.loss == pytest.approx(expected, rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_hook_that_updates_parameters_does_so_in_no_measured_pass(budget: int) -> None:
    """PyTorch's tutorial: an optimizer for each parameter steps once its gradient is there."""

    def hooked() -> nn.Module:
        torch.manual_seed(0)
        model = mlp()
        own = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

        def step(parameter: Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(step)
        return model

    batch, plain, model = images(), hooked(), hooked()
    with Session(model, still(model), budget, tolerance=0) as session:
        plan = session.prepare(batch, mean)
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, other)
        session.plan = replace(plan, micro_batch=4)  # parts would update them three times
        for _ in range(3):
            expected = mean(plain, batch)
            expected.backward()
            assert session.backward(batch, mean).loss == pytest.approx(expected.item(), rel=1e-6)
        assert "a hook acts on its gradients" in session.split_refusal
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)


class Exiting(nn.Module):
    """Runs its second layer for batches that are uncertain on average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if x.mean() > 0:
            hidden = torch.tanh(self.second(hidden))
        result: Tensor = self.last(hidden)
        return result


def test_parts_that_take_another_way_through_the_model_are_not_cut(budget: int) -> None:
    model = Exiting()
    labels = torch.randint(0, 5, (12,))
    alike, mixed = torch.randn(12, 6) - 5.0, torch.randn(12, 6) - 5.0
    mixed[:4] += 9.0  # below zero on average, but not in the first part
    with Session(model, still(model), budget, tolerance=0) as session:
        assert in_micro_batches(session, (alike, labels), mean, 4).micro_batch == 4
        session.optimizer.zero_grad()
        report = session.step((mixed, labels), mean)
        assert report.micro_batch == 12
        assert model.second.weight.grad is None


@pytest.mark.parametrize("kind", ["closure", "attribute"])
def test_what_draws_from_a_generator_of_its_own_is_not_cut(kind: str, budget: int) -> None:
    source, model = torch.Generator().manual_seed(3), mlp()
    if kind == "attribute":
        model.source = source  # type: ignore[assignment]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        own: torch.Generator = getattr(model, "source", source)
        return F.cross_entropy(model(batch[0]) * (0.5 + torch.rand((), generator=own)), batch[1])

    state = source.get_state()
    with Session(model, still(model), budget, tolerance=0) as session:
        session.prepare(images(), loss)
        assert "generator of its own" in session.split_refusal
        assert torch.equal(source.get_state(), state)


def test_parts_of_which_only_some_take_a_branch_are_not_cut(budget: int) -> None:
    """As the proof's batch did both, every parameter is known."""
    model = Exiting()
    labels = torch.randint(0, 5, (12,))
    inside, mixed = torch.randn(12, 6) + 5.0, torch.randn(12, 6) - 5.0
    mixed[2] += 9.0
    with Session(model, still(model), budget, tolerance=0) as session:
        assert in_micro_batches(session, (inside, labels), mean, 1).micro_batch == 1
        session.optimizer.zero_grad()
        report = session.step((mixed, labels), mean)
        assert report.micro_batch == 12
        assert model.second.weight.grad is None
