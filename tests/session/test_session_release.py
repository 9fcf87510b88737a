"""Releasing gradients under a budget: before the first update a retry, after it a finish."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.errors import BudgetError, CommittedStepError, ReleaseRefusedError
from daf.core.plan import Plan
from daf.core.policy import plain_policy
from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason
from daf.session.plan_selector import PlanSelector
from daf.session.session import Session

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
MIB = 2**20
Batch = tuple[Tensor, Tensor]


class Greedy(torch.autograd.Function):
    """In backward takes so many bytes for a moment, or raises: what is next in ``wishes``.

    A function is called for its bytes.
    """

    reads_only_what_it_saved = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, wishes: list[Any]) -> Tensor:
        ctx.wishes = wishes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wish = ctx.wishes.pop(0) if len(ctx.wishes) > 1 else ctx.wishes[0]
        if isinstance(wish, Exception):
            raise wish
        torch.ones(wish() if callable(wish) else wish, dtype=torch.uint8)
        return gradient, None


class Wishes(list[Any]):
    """What each backward pass does; a retried step finds all entries of a plain list again."""


class Model(nn.Module):
    """Its last layer's gradients are complete when ``Greedy`` runs, the first one's are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)
        self.in_backward = Wishes([0])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Greedy.apply(torch.relu(self.first(x)), self.in_backward))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(examples: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(examples, 64, generator=generator),
        torch.randint(10, (examples,), generator=generator),
    )


def session_of(model: nn.Module, mode: Any = True) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Session(model, optimizer, "8GB", bits="exact", release_gradients=mode)


@pytest.fixture
def tighter_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every plan of the whole batch lies one of two micro-batches, whatever was measured."""

    def halved(_profiles: object, plan: Plan, *_constraints: Any) -> Plan | None:
        return replace(plan, micro_batch=16) if plan.micro_batch == 32 else None

    monkeypatch.setattr("daf.planning.planner.tighter_plan", halved)


@pytest.fixture
def plans_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan releases gradients, although there were room for them."""
    begin = PlanSelector.begin

    def releasing(self: PlanSelector, *terms: Any) -> Plan:
        self.plan, self.first = replace(begin(self, *terms), release_gradients=True), None
        return self.plan

    def the_same(self: PlanSelector, *_terms: Any, **_more: Any) -> Plan | None:
        return self.plan

    monkeypatch.setattr(PlanSelector, "begin", releasing)
    monkeypatch.setattr(PlanSelector, "again", the_same)


def plain_step(model: nn.Module) -> dict[str, Tensor]:
    model = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    cross_entropy(model, batch()).backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.usefixtures("tighter_is_halved", "plans_release")
def test_after_the_first_update_the_step_is_finished_and_its_overrun_told() -> None:
    model = Model()
    expected = plain_step(model)
    with session_of(model, "auto") as session:
        session.prepare(batch(), cross_entropy)
        session._plan_controller.selector.first = None
        model.in_backward[:] = [0, 100 * MIB]  # in the rehearsal, and after it
        session.budget_bytes = process_memory.resident_bytes() + 40 * MIB
        report = session.step(batch(), cross_entropy)
        assert report.released_gradients == 4
        assert report.charged_peak_bytes >= report.budget_bytes + report.overrun_bytes
        assert 40 * MIB < report.overrun_bytes <= 100 * MIB
        for name, value in expected.items():
            assert torch.equal(model.state_dict()[name], value), name
        with pytest.raises(RuntimeError, match="can't allocate memory"):  # the step has finished
            torch.ones(60 * MIB, dtype=torch.uint8)
        # The next step runs under the next tighter plan, which is to cut the batch.
        model.in_backward[0] = 0
        report = session.step(batch(), cross_entropy)
        assert (report.overrun_bytes, report.micro_batch, report.released_gradients) == (0, 16, 0)
        assert "cut into 2 micro-batches" in session.release_refusal


@pytest.mark.usefixtures("tighter_is_halved", "plans_release")
def test_an_evaluation_inside_a_step_that_must_finish_leaves_it_to_finish() -> None:
    model = Model()
    evaluated: list[int] = []

    def evaluates_first() -> int:
        evaluated.append(len(session.evaluate(batch(4), lambda model, given: model(given[0]))))
        return 100 * MIB

    with session_of(model, "auto") as session:
        session.prepare(batch(), cross_entropy)
        session._plan_controller.selector.first = None
        model.in_backward[:] = [0, evaluates_first]
        session.budget_bytes = process_memory.resident_bytes() + 40 * MIB
        report = session.step(batch(), cross_entropy)
        assert evaluated == [4]
        assert report.released_gradients == 4
        assert 40 * MIB < report.overrun_bytes <= 100 * MIB
        with pytest.raises(RuntimeError, match="can't allocate memory"):  # the step has finished
            torch.ones(60 * MIB, dtype=torch.uint8)


@pytest.mark.usefixtures("plans_release")
def test_a_budget_that_falls_before_the_first_update_leaves_the_step_uncommitted() -> None:
    model = Model()
    with session_of(model) as session:
        session.prepare(batch(), cross_entropy)
        session._plan_controller.selector.first = None
        model.in_backward[0] = 60 * MIB
        assert session.step(batch(), cross_entropy).released_gradients == 4
        before = deepcopy(model.state_dict())
        calls: list[int] = []

        def falling(model: nn.Module, given: Batch) -> Tensor:
            calls.append(1)
            session.budget_bytes = process_memory.resident_bytes() + 30 * MIB
            return cross_entropy(model, given)

        with pytest.raises(BudgetError):
            session.step(batch(), falling)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Early(Model):
    """The greedy part is behind the last layer: it runs before any gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.norm(self.last(torch.relu(self.first(x))))
        return Greedy.apply(scores, self.in_backward)


def test_before_the_first_update_parameters_are_untouched_and_the_step_can_be_repeated() -> None:
    model = Early()
    expected = plain_step(model)
    with session_of(model) as session:
        session.prepare(batch(), cross_entropy)
        session._plan_controller.selector.first = None
        model.in_backward[0] = 100 * MIB
        session.budget_bytes = process_memory.resident_bytes() + 40 * MIB
        before = deepcopy(model.state_dict())
        with pytest.raises(BudgetError):
            session.step(batch(), cross_entropy)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        model.in_backward[0] = 0
        assert session.step(batch(), cross_entropy).released_gradients == 6
        for name, value in expected.items():
            assert torch.equal(model.state_dict()[name], value), name


def early_without_norm() -> Model:
    model = Early()
    model.norm = nn.Identity()
    return model


@pytest.mark.usefixtures("tighter_is_halved", "plans_release")
@pytest.mark.parametrize("make", [Model, early_without_norm])
def test_a_rehearsal_without_room_commits_nothing_and_its_retry_releases_nothing(
    make: Callable[[], Model],
) -> None:
    """Whether the room is missing after the first update would have come, or before."""
    model = make()
    expected = plain_step(model)
    with session_of(model, "auto") as session:
        session.prepare(batch(), cross_entropy)
        session._plan_controller.selector.first = None
        model.in_backward[:] = [100 * MIB, 0]
        session.budget_bytes = process_memory.resident_bytes() + 40 * MIB
        report = session.step(batch(), cross_entropy)
        assert (report.micro_batch, report.released_gradients, report.overrun_bytes) == (16, 0, 0)
        assert "cut into 2 micro-batches" in session.release_refusal
        for name, value in expected.items():
            torch.testing.assert_close(model.state_dict()[name], value)


def test_an_error_after_the_first_update_says_that_parameters_are_between_two_steps() -> None:
    model = Model()
    with session_of(model) as session:
        session.prepare(batch(), cross_entropy)
        model.in_backward[:] = [0, RuntimeError("can't allocate memory")]
        before = deepcopy(model.state_dict())
        with pytest.raises(CommittedStepError, match="after 2 parameters") as caught:
            session.step(batch(), cross_entropy)
    assert str(caught.value.__cause__) == "can't allocate memory"
    model.in_backward.clear()  # the error's frames hold the graph, and that the list: a circle
    changed = {n for n, value in model.state_dict().items() if not torch.equal(before[n], value)}
    assert changed == {"last.weight", "last.bias"}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mode", [True, "auto"])
def test_a_plan_of_pieces_releases_nothing(mode: Any) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = Session(model, optimizer, None, release_gradients=mode)
    session.plan = Plan(plain_policy(), 8, 0, return_freed_blocks=False, reason="a test")
    if mode is True:
        with pytest.raises(ReleaseRefusedError, match="cut into 4 micro-batches"):
            session.step(batch(), cross_entropy)
    else:
        assert session.step(batch(), cross_entropy).released_gradients == 0
        assert "cut into 4 micro-batches" in session.release_refusal
