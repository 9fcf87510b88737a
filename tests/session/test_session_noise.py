"""Sessions measure sensitivities, plan by them, count noise and tell; training never notices."""

from __future__ import annotations

import gc
import json
import logging
import math
import random
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import planned
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.code_errors import relative_error
from daf.core.errors import BudgetError, DataError, NonFiniteLossError
from daf.core.plan import Plan
from daf.core.policy import Method, Policy, plain_policy
from daf.core.profile import Profiles
from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason
from daf.memory.statistics import stats
from daf.planning.noise import expected_noise
from daf.planning.options import Allowed
from daf.sensitivity import tracker as sensitivity_tracker
from daf.sensitivity.estimate import Effort
from daf.sensitivity.result import Sensitivity, SiteSensitivity
from daf.session.noise_controller import Response
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
needs_limit = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
FAINT = 0.02
CODES_ONLY = Allowed(
    methods=frozenset(Method) - {Method.SPILL}, replay=False, release_gradients=False
)


class Branches(nn.Module):
    """Two alike, of which one hardly reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loud = self._branch()
        self.faint = self._branch()
        self.norm = nn.BatchNorm2d(16)  # so that the batch is not cut
        self.head = nn.Linear(16, 10)

    def _branch(self) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 16, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.loud(x) + FAINT * self.faint(x)
        found: Tensor = self.head(self.norm(both).relu().mean((2, 3)))
        return found


def images(count: int = 32, size: int = 32) -> Batch:
    torch.manual_seed(1)
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def session_for(model: nn.Module, budget: str | int | None = None, **options: Any) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Session(model, optimizer, budget, **options)


def least_budget(batch: Batch | None = None, **options: Any) -> int:
    """Of ``Branches`` on ``images``, as this process is now."""
    with (
        session_for(Branches(), "10MB", **options) as session,
        pytest.raises(BudgetError) as caught,
    ):
        session.prepare(batch or images(), cross_entropy)
    assert caught.value.least_bytes is not None
    return caught.value.least_bytes


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Load what measuring runs: a process where a test is the first would hold it only later."""
    if unsupported_reason() is None:
        budget = process_memory.resident_bytes() + 2**30
        with session_for(Branches(), budget, policy="quantize") as session:
            for _ in range(2):
                session.noise.tracker.schedule.trained_ms = 1e9
                session.step(images(), cross_entropy)
            assert session.noise.tracker.measurements


@cache
def _least_above_resident() -> int:
    gc.collect()
    return least_budget(policy="quantize") - process_memory.resident_bytes()


def roomy_budget() -> int:
    """Some MB above the least under which all is coded."""
    above_bytes = _least_above_resident()  # the first optimizer of a process brings the compiler in
    return process_memory.resident_bytes() + above_bytes + 10_000_000


def whole_gradient(model: nn.Module, batch: Batch, policy: Policy, index: int) -> Tensor:
    with Capture(model).step(policy, 0, index, batch=batch):
        loss = cross_entropy(model, batch)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, [*model.parameters()])])


def error_of(model: nn.Module, batch: Batch, policy: Policy, draws: int = 16) -> float:
    """The plain way: the mean squared distance from the plain gradient, over seeds."""
    exact = whole_gradient(model, batch, plain_policy(), 0).double()
    found = [whole_gradient(model, batch, policy, 100 + n).double() for n in range(draws)]
    return float(torch.stack([(each - exact).square().sum() for each in found]).mean())


def mean_error(plan: Plan, branch: str) -> float:
    found = [
        relative_error(treatment)
        for site, treatment in plan.policy.by_site.items()
        if site.module.startswith(branch) and site.operator == "conv2d" and site.module[-1] in "24"
    ]
    assert len(found) == 2
    return sum(found) / len(found)


@pytest.mark.parametrize(
    "policy", ["optimal", pytest.param("quantize", marks=pytest.mark.thorough)]
)
def test_widths_go_to_the_branch_that_reaches_the_loss(policy: str) -> None:
    model, batch = Branches(), images()
    with session_for(model, roomy_budget(), bits=2) as session:
        session.prepare(batch, cross_entropy)
        measured = session.profile
    assert measured is not None
    assert session.noise.tracker.measurements == 1
    low, high = (
        planned.least_budget(measured, policy=level, allowed=CODES_ONLY)
        for level in ("1-bit", "4-bit")
    )
    make_plan = partial(
        planned.make_plan, budget_bytes=low + 2 * (high - low) // 3, allowed=CODES_ONLY
    )
    unweighted = make_plan(
        replace(measured, weights={}, noise_per_weight=0.0), policy="quantize", tolerance=math.inf
    )
    least_noise = make_plan(measured, policy="quantize", tolerance=math.inf).added_noise
    plan = make_plan(measured, policy=policy, tolerance=1.1 * least_noise)
    assert plan.added_noise <= 1.1 * least_noise
    assert mean_error(plan, "loud") < 0.2 * mean_error(plan, "faint")
    assert error_of(model, batch, plan.policy) < 0.5 * error_of(model, batch, unweighted.policy)


def test_the_noise_that_is_told_is_the_noise_there_is() -> None:
    model, batch = Branches(), images()
    budget = roomy_budget()
    with session_for(model, budget, bits=2) as session:
        plan = session.prepare(batch, cross_entropy)
        assert plan.policy.name == "2-bit"
        reported = session.step(batch, cross_entropy)
        found = session.sensitivity
    assert found is not None
    assert found.batch_variance is not None
    own = found.batch_variance * found.examples / len(batch[1])
    assert reported.batch_variance == pytest.approx(own)
    assert reported.added_noise == pytest.approx(plan.added_noise)
    twin = Branches()  # as it was when it was measured
    added = error_of(twin, batch, plan.policy)
    assert plan.added_noise * own == pytest.approx(added, rel=0.4)
    # Gradients of batches of other images, each as large: what they scatter by.
    gradients = []
    for seed in range(24):
        torch.manual_seed(100 + seed)
        other = torch.randn_like(batch[0]), torch.randint(0, 10, batch[1].shape)
        gradients.append(whole_gradient(twin, other, plain_policy(), 0))
    assert own == pytest.approx(float(torch.stack(gradients).double().var(0).sum()), rel=0.5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_noise_is_that_of_the_optimizer_s_steps(optimizer: Any) -> None:
    """One branch hardly reaches the loss, which is nothing to an optimizer that divides by that."""
    model, batch = Branches(), images()
    budget = roomy_budget()
    with Session(model, optimizer(model.parameters(), lr=1e-3), budget, bits=2) as session:
        session.prepare(batch, cross_entropy)
        found = session.sensitivity
    assert found is not None
    assert found.relative is (optimizer is torch.optim.AdamW)
    loud, faint = (
        sum(e.variance_per_error for site, e in found.sites.items() if site.module.startswith(name))
        for name in ("loud", "faint")
    )
    assert (faint > 0.3 * loud) is found.relative


def test_sensitivities_for_another_kind_of_optimizer_are_measured_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = images()
    budget = roomy_budget()
    with session_for(Branches(), budget, bits=2) as session:
        session.prepare(batch, cross_entropy)
        known = session.sensitivity
    assert known is not None
    model = Branches()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Session(model, adam, budget, bits=2, sensitivity=known) as session:
        assert session.sensitivity is None
        assert "measured for an optimizer of another kind" in caplog.text
        session.prepare(batch, cross_entropy)
        assert session.sensitivity is not None
        assert session.sensitivity.relative
    caplog.clear()
    with session_for(Branches(), budget, bits=2, sensitivity=known) as session:
        assert session.sensitivity == known
    assert not caplog.text


def test_measuring_is_not_noticed_by_training() -> None:
    batch = images()

    def trained(**options: Any) -> tuple[Session, list[float], tuple[Any, ...]]:
        model = Branches()
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        session = session_for(model, bits=2, **options)
        losses = []
        for _ in range(3):
            session.noise.tracker.schedule.trained_ms = 1e9  # it has earned any measurement
            losses.append(session.step(batch, cross_entropy).loss)
        numbers = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        return session, losses, (numbers, [each.grad.clone() for each in model.parameters()])

    ours, losses, after = trained()
    theirs, plain_losses, plain_after = trained(sensitivity=False)
    assert ours.noise.tracker.measurements == 3
    assert theirs.noise.tracker.measurements == 0
    assert losses == plain_losses
    assert after[0] == plain_after[0]
    assert all(torch.equal(*pair) for pair in zip(after[1], plain_after[1], strict=True))
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [row["site"] for row in ours.explain()] == [row["site"] for row in theirs.explain()]
    assert ours.saved_bytes_peak == theirs.saved_bytes_peak


def test_a_measurement_waits_until_it_is_within_two_hundredths_of_training() -> None:
    session, batch = session_for(Branches(), bits=2), images()
    report = session.step(batch, cross_entropy)
    schedule, sensed = session.noise.tracker.schedule, session.noise.tracker
    assert (report.measuring_ms, report.added_noise) == (0.0, None)
    expected_ms = sensitivity_tracker.PASSES * report.step_ms / sensitivity_tracker.PART
    schedule.trained_ms = expected_ms / 0.02 - 2 * report.step_ms
    assert not sensed.is_due(len(batch[1]), report.step_ms)
    schedule.trained_ms = expected_ms / 0.02 + 1
    assert sensed.is_due(len(batch[1]), report.step_ms)
    schedule.trained_ms = 1e9
    report = session.step(batch, cross_entropy)
    assert report.measuring_ms == schedule.measured_ms > 0.0
    assert report.added_noise is not None
    # As long as that one lasted is what the next one is expected to.
    schedule.trained_ms = 0.0
    assert session.step(batch, cross_entropy).measuring_ms == 0.0


def test_before_the_first_step_few_passes_measure_and_training_earns_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, Effort]] = []
    measure = sensitivity_tracker.measure_sensitivity

    def noted(*given: Any, effort: Effort, **named: Any) -> Sensitivity:
        asked.append((len(given[2][1]), effort))
        return measure(*given, effort=effort, **named)

    monkeypatch.setattr(sensitivity_tracker, "measure_sensitivity", noted)
    x, labels = images()
    batch = x.repeat(4, *[1] * (x.dim() - 1)), labels.repeat(4)
    with session_for(Branches(), roomy_budget() + 400_000_000, bits=2) as session:
        session.prepare(batch, cross_entropy)
        session.noise.tracker.schedule.trained_ms = 1e9
        session.step(batch, cross_entropy)
    (few, first), (more, later) = asked
    assert (few, more) == (len(batch[1]) // 8, len(batch[1]) // 4)
    assert later == Effort()
    assert (first.local, first.others, first.bias) == (0, 2, later.bias)


@needs_limit
def test_a_measurement_that_is_refused_memory_is_given_up_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def greedy(model: nn.Module, loss_fn: Any, part: Batch, *_: Any, **__: Any) -> Sensitivity:
        asked.append(len(part[1]))
        loss_fn(model, part).backward  # noqa: B018
        torch.empty(2_000_000_000, dtype=torch.uint8)
        raise AssertionError("it was granted")

    monkeypatch.setattr(sensitivity_tracker, "measure_sensitivity", greedy)
    budget = least_budget(policy="quantize") + 4_000_000
    model, batch = Branches(), images()
    with session_for(model, budget, policy="quantize") as session:
        before = [each.clone() for each in model.parameters()]
        session.prepare(batch, cross_entropy)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        for _ in range(3):
            session.noise.tracker.schedule.trained_ms = 1e9
            report = session.step(batch, cross_entropy)
            assert report.added_noise is None
        assert asked == [8, 4]  # below four examples nothing is asked any more
        assert session.noise.tracker.refusal == ""
        assert session.peak_bytes <= budget


@needs_limit
def test_measuring_keeps_within_the_budget() -> None:
    model, batch = Branches(), images(96)  # enough that the least budget needs codes
    budget = least_budget(batch, policy="quantize") + 2_000_000
    with session_for(model, budget, policy="quantize") as session:
        process_memory.reset_peak()
        for _ in range(3):
            session.noise.tracker.schedule.trained_ms = 1e9
            session.step(batch, cross_entropy)
        assert session.noise.tracker.measurements == 4
        assert session.peak_bytes <= budget


@needs_limit
def test_planning_by_new_numbers_is_part_of_their_price() -> None:
    model, batch = Branches(), images(96)
    budget = least_budget(batch, tolerance=None, split=True) + 1_000_000  # without a proof's room
    with session_for(model, budget, split=True) as session:
        session.prepare(batch, cross_entropy)
        schedule, sensed = session.noise.tracker.schedule, session.noise.tracker
        assert schedule.planned_ms == 0.0  # the first plan is needed anyway
        schedule.trained_ms = 1e9
        session.step(batch, cross_entropy)
        foreground_ms = schedule.planned_ms
        assert sensed.measurements == 2
        assert foreground_ms > 0.0
        schedule.trained_ms = 0.0  # so that nothing is measured again
        while not session.is_settled:
            session.step(batch, cross_entropy)
        assert session._plan_controller.selector.reweighed_ms > 0.0
        assert schedule.planned_ms == foreground_ms + session._plan_controller.selector.reweighed_ms
        assert schedule.plans == 1
        spent_ms = schedule.measured_ms + schedule.planned_ms
        assert sensed.last_ms is not None
        next_ms = sensed.last_ms + schedule.planned_ms
        schedule.trained_ms = (spent_ms + next_ms) / 0.02 - 1.0
        assert not sensed.is_due(len(batch[1]), 1.0)
        schedule.trained_ms += 2.0
        assert sensed.is_due(len(batch[1]), 1.0)


@needs_limit
def test_a_measurement_keeps_no_more_freed_blocks_than_it_is_predicted_to_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = least_budget(policy="quantize") + 2_000_000
    session, batch = session_for(Branches(), budget, policy="quantize"), images()
    limits = []

    def look(*_: Any, **__: Any) -> Sensitivity:
        others = process_memory.resident_bytes() - stats()["held_bytes.current"]
        limits.append(others + stats()["limit_bytes"])
        raise NonFiniteLossError("enough was seen")

    monkeypatch.setattr(sensitivity_tracker, "measure_sensitivity", look)
    with session:
        session.prepare(batch, cross_entropy)
        found = session.noise.tracker
        assert session.profile is not None
        predicted = found._predicted_bytes(session.profile, found._examples(len(batch[1])))
    assert len(limits) == 1
    assert limits[0] <= predicted < budget


def test_what_goes_wrong_in_a_measurement_is_told_and_stops_nothing() -> None:
    session, batch = session_for(Branches(), bits=2), images()

    def whole_batches_only(model: nn.Module, part: Batch) -> Tensor:
        if len(part[1]) != 32:
            raise TypeError("32 images, please")
        return cross_entropy(model, part)

    session.noise.tracker.schedule.trained_ms = 1e9
    for _ in range(2):
        assert session.step(batch, whole_batches_only).added_noise is None
    assert session.noise.tracker.refusal.endswith("32 images, please")
    assert session.noise.tracker.measurements == 0


def shouting(found: Sensitivity, module: str, factor: float) -> Sensitivity:
    """The same with one module's sites ``factor`` times as sensitive."""
    sites = {
        site: replace(each, variance_per_error=factor * each.variance_per_error)
        if site.module.startswith(module)
        else each
        for site, each in found.sites.items()
    }
    return replace(found, sites=sites)


def test_a_new_measurement_plans_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = images()
    room = roomy_budget()
    with session_for(Branches(), room, policy="quantize", tolerance=1e-9) as session:
        session.step(batch, cross_entropy)
        profile, found = session.profile, session.sensitivity
        assert profile is not None
        assert found is not None
        budget = planned.least_budget(profile, policy="2-bit", allowed=CODES_ONLY)
        selector = session._plan_controller.selector
        selector.allow(CODES_ONLY)
        selector.reweigh(Profiles(session.noise.tracker.weighed(profile)), budget)
        before = session.plan
        assert before is not None
        turned = shouting(found, "faint", 1e6)
        monkeypatch.setattr(sensitivity_tracker, "measure_sensitivity", lambda *_, **__: turned)
        session.noise.tracker.schedule.trained_ms = 1e9
        context = session._context(batch, cross_entropy)
        session.noise.after_step(context, before, 1.0, budget)
        after = session.plan
        assert after is not None
        assert session.profile is not None
        assert mean_error(after, "faint") < mean_error(before, "faint")
        old = sum(expected_noise(session.profile, before.policy, before.micro_batch).values())
        assert after.added_noise < old
        assert after.predicted_peak_bytes <= budget
        assert session.noise_history[-1].response is Response.WIDENED
        assert session.noise_history[-1].relative_noise == pytest.approx(old)


def test_codes_that_are_biased_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much noise is asked for: bias adds up, so no tolerance allows it."""
    batch = images()
    with session_for(Branches(), roomy_budget(), policy="quantize", tolerance=1e9) as session:
        session.step(batch, cross_entropy)
        profile, found = session.profile, session.sensitivity
        assert profile is not None
        assert found is not None
        selector = session._plan_controller.selector
        selector.allow(CODES_ONLY)
        budget = planned.least_budget(profile, policy="2-bit", allowed=CODES_ONLY)
        selector.reweigh(Profiles(session.noise.tracker.weighed(profile)), budget)
        before = session.plan
        assert before is not None
        budget += 2_000_000
        context = session._context(batch, cross_entropy)
        for bias in (0.003, 0.03):
            known = replace(found, squared_bias=bias, squared_bias_error=0.001)
            measure = partial(replace, known)  # a copy
            monkeypatch.setattr(
                sensitivity_tracker, "measure_sensitivity", lambda *_, made=measure, **__: made()
            )
            session.noise.tracker.schedule.trained_ms = 1e9
            told = session.noise.after_step(context, before, 1.0, budget)
            assert told["squared_bias"] == bias
            context = replace(context, index=context.index + 1)
            session.noise.tracker.sensitivity = None  # the next is no average
        after = session.plan
        assert after is not None
        assert after.added_noise < before.added_noise
        assert after.predicted_peak_bytes <= budget
        doubtful, sure = session.noise_history[-2:]
        assert (doubtful.response, sure.response) == (None, Response.WIDENED)
        assert (sure.squared_bias, sure.squared_bias_error) == (0.03, 0.001)


def test_a_bias_is_told_once_where_codes_are_the_user_s(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, batch = session_for(Branches(), bits=1, tolerance=1e9), images()
    measure = sensitivity_tracker.measure_sensitivity

    def biased(*given: Any, **named: Any) -> Sensitivity:
        return replace(measure(*given, **named), squared_bias=0.03, squared_bias_error=0.001)

    monkeypatch.setattr(sensitivity_tracker, "measure_sensitivity", biased)
    with caplog.at_level(logging.WARNING, "daf"):
        for _ in range(2):
            session.noise.tracker.schedule.trained_ms = 1e9
            session.step(batch, cross_entropy)
    assert [record.response for record in session.noise_history] == [Response.NO_ROOM] * 2
    assert len(caplog.records) == 1
    assert "0.0300 of the gradient's square are errors of codes that do not average" in caplog.text
    assert session.plan is not None
    assert session.plan.policy.name == "1-bit"


def test_too_much_noise_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    session, batch = session_for(Branches(), bits=1, tolerance=1e-4), images()
    with caplog.at_level(logging.WARNING, "daf"):
        for _ in range(3):
            session.noise.tracker.schedule.trained_ms = 1e9
            session.step(batch, cross_entropy)
    assert [record.response for record in session.noise_history] == [Response.NO_ROOM] * 3
    assert len(caplog.records) == 1
    assert "no room for more bits" in caplog.text
    added = session.noise_history[-1].relative_noise
    assert sum(session.noise.by_site.values()) == pytest.approx(added)
    assert [*session.noise.by_site.values()] == sorted(session.noise.by_site.values(), reverse=True)


def test_a_tolerance_that_the_budget_cannot_keep_is_kept_as_nearly_as_can_be() -> None:
    batch = images()
    room = roomy_budget()
    with session_for(Branches(), room, tolerance=0.2) as session:
        session.step(batch, cross_entropy)
        known = session.profile
        assert known is not None
        budget = planned.least_budget(known, policy="2-bit", allowed=CODES_ONLY)
        session._plan_controller.selector.allow(CODES_ONLY)
        loud = replace(known, noise_per_weight=1e12)
        session._plan_controller.selector.reweigh(Profiles(loud), budget)
        assert session.plan is not None
        assert session.plan.predicted_peak_bytes <= budget
        assert session.plan.added_noise > 0.2
        assert session._plan_controller.selector.constraints.tolerance == (0.2, 0.5, 1.0, math.inf)


def test_a_pool_gives_up_what_matters_least_first() -> None:
    found = {}
    for loudest in ("loud", "faint"):
        probe = session_for(Branches(), bits=4)
        probe.noise.tracker.schedule.trained_ms = 1e9
        full = probe.step(images(), cross_entropy).saved_bytes
        assert probe.sensitivity is not None
        known = shouting(probe.sensitivity, loudest, 1e9)
        session = session_for(Branches(), bits=4, pool_bytes=int(0.8 * full), sensitivity=known)
        report = session.step(images(), cross_entropy)
        assert report.evicted_bytes > 0
        rows = session.explain()
        found[loudest] = {
            branch: sum(row["evicted_bytes"] for row in rows if str(row["site"]).startswith(branch))
            for branch in ("loud", "faint")
        }
    assert found["loud"]["loud"] < 0.2 * found["loud"]["faint"]
    assert found["faint"]["faint"] < 0.2 * found["faint"]["loud"]


def test_planes_that_were_given_up_count_as_noise() -> None:
    probe, batch = session_for(Branches(), bits=4), images()
    probe.noise.tracker.schedule.trained_ms = 1e9
    full = probe.step(batch, cross_entropy)
    capped = session_for(
        Branches(), bits=4, pool_bytes=int(0.75 * full.saved_bytes), sensitivity=probe.sensitivity
    )
    report = capped.step(batch, cross_entropy)
    assert report.evicted_bytes > 0
    assert full.added_noise is not None
    assert report.added_noise is not None
    assert report.added_noise > 2 * full.added_noise


def test_sensitivities_are_taken_over_by_another_session_and_by_a_resumed_one() -> None:
    budget = least_budget(policy="quantize") + 3_000_000
    batch = images()
    with session_for(Branches(), budget, policy="quantize") as first:
        plan = first.prepare(batch, cross_entropy)
        state = json.loads(json.dumps(first.state_dict()))
        known = first.sensitivity
    assert known is not None
    with session_for(Branches(), budget, policy="quantize", sensitivity=known) as second:
        second.prepare(batch, cross_entropy)
        assert second.noise.tracker.measurements == 0
        assert second.profile is not None
        assert second.profile.weights == known.weights()
    with session_for(Branches(), budget, policy="quantize") as resumed:
        resumed.load_state_dict(state)
        assert resumed.sensitivity == known
        assert resumed.plan == plan
        assert resumed.noise.tracker.schedule == first.noise.tracker.schedule
        report = resumed.step(batch, cross_entropy)
        assert report.added_noise == pytest.approx(plan.added_noise)


def test_sensitivities_of_another_model_are_refused() -> None:
    probe = session_for(Branches(), bits=2)
    probe.noise.tracker.schedule.trained_ms = 1e9
    probe.step(images(), cross_entropy)
    assert probe.sensitivity is not None
    site, value = next(iter(probe.sensitivity.sites.items()))
    other = replace(probe.sensitivity, sites={replace(site, module="elsewhere"): value})
    budget = least_budget(policy="quantize") + 3_000_000
    with (
        session_for(Branches(), budget, sensitivity=other) as session,
        pytest.raises(DataError, match="none of which is one of this model's"),
    ):
        session.prepare(images(), cross_entropy)


def test_what_cannot_be_told_from_nothing_counts_as_its_error() -> None:
    assert SiteSensitivity(0.0, 2.0).at_least == 2.0
    assert SiteSensitivity(3.0, 2.0).at_least == 3.0
