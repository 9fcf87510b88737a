"""A session under a budget may fuse and chunk operators: same training, less memory."""

from __future__ import annotations

import gc
import math
from collections import Counter
from copy import deepcopy
from functools import cache

import planned
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.plan import Plan
from daf.core.policy import Reading
from daf.core.profile import Profiles
from daf.core.step_report import StepReport
from daf.memory import process_memory
from daf.memory.glibc import return_free_memory
from daf.memory.recycling_allocator import unsupported_reason
from daf.planning import planner
from daf.profiling.step_observer import unseen
from daf.session import plan_autotuner, plan_controller
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
MIB = 2**20
needs_limit = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 32, 32, 32, 32):
        convolution = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def images() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (64,), generator=generator)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def return_what_earlier_tests_held() -> None:
    """What is free but resident would be returned in mid-test, and numbers would not add up."""
    gc.collect()
    return_free_memory()


@cache
def least_and_kept_bytes() -> tuple[int, int]:
    """Above what the process holds: the least budget, and the one that keeps everything."""
    return_what_earlier_tests_held()
    model = network()
    with Session(model, sgd(model), "8GB", sensitivity=False) as session:
        session.prepare(images(), cross_entropy)
        assert session.profile is not None
        kept, least = planner.kept_peak_bytes(session.profile), session.least_feasible_bytes()
    assert least is not None
    return least - session.profile.floor_bytes, kept - session.profile.floor_bytes


def prepared(share: float) -> Session:
    """With a budget at a share of the way from the least one to keeping everything."""
    least, kept = least_and_kept_bytes()
    return_what_earlier_tests_held()
    budget = process_memory.resident_bytes() + int(least + share * (kept - least))
    model = network()
    fresh = Session(model, sgd(model), budget, sensitivity=False)
    fresh.prepare(images(), cross_entropy)
    return fresh


@needs_limit
def test_fused_operators_are_measured_where_not_everything_fits() -> None:
    with prepared(0.3) as session:
        measured = session._plan_controller.selector.profiles.fused
        assert measured is not None
        assert measured.is_fused
        assert sum(bool(each.pattern) for each in measured.fusions) == 5
        in_place = [each for each in measured.savings if each.reading is Reading.IN_PLACE]
        assert {each.site.operator for each in in_place} == {"batch_norm"}
    with prepared(1.5) as session:
        assert session._plan_controller.selector.profiles.fused is None
        assert session.plan is not None
        assert session.plan.policy.name == "plain"


@needs_limit
def test_a_fused_plan_trains_within_its_budget_and_says_what_it_fuses() -> None:
    with prepared(0.3) as session:
        measured, budget_bytes = (
            session._plan_controller.selector.profiles.fused,
            session.budget_bytes,
        )
        assert measured is not None
        assert budget_bytes is not None
        # Whichever is faster on this machine: here the fused plan is carried out.
        allowed = session._plan_controller.selector.constraints.allowed
        session.plan = planned.make_plan(measured, budget_bytes, allowed=allowed)
        assert session.plan.policy.fused
        assert sum("fused as batch_norm + relu" in line for line in session.plan.choices) == 5
        reports = [session.step(images(), cross_entropy) for _ in range(3)]
        assert max(report.peak_bytes for report in reports) <= budget_bytes
        assert session.plan.policy.fused  # nothing was refused, and no tighter plan taken
        operators = {row["site"].split(":")[1].split("#")[0] for row in session.explain()}
        assert "batch_norm" in operators
    plain = network()
    optimizer = sgd(plain)
    for report in reports:
        loss = cross_entropy(plain, images())
        assert report.loss == pytest.approx(loss.item(), rel=0.02)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@needs_limit
def test_exact_training_derives_what_convolutions_read_from_what_norms_hold() -> None:
    """At a tolerance of 0: no code, 20 MiB of 80 that are saved held nowhere, the same training."""
    return_what_earlier_tests_held()
    model = network()
    with Session(model, sgd(model), "8GB", tolerance=0.0) as roomy:
        roomy.prepare(images(), cross_entropy)
        assert roomy.profile is not None
        budget = planner.kept_peak_bytes(roomy.profile) - 20 * MIB
    model = network()
    with Session(model, sgd(model), budget, tolerance=0.0) as session:
        session.prepare(images(), cross_entropy)
        measured, budget_bytes = (
            session._plan_controller.selector.profiles.fused,
            session.budget_bytes,
        )
        assert measured is not None
        assert budget_bytes is not None
        assert session.profile is not None
        # By what this session measured: the process may hold less than when the other one did.
        asked_bytes = min(budget_bytes, planner.kept_peak_bytes(session.profile) - 20 * MIB)
        allowed = session._plan_controller.selector.constraints.allowed
        session.plan = planned.make_plan(measured, asked_bytes, tolerance=0.0, allowed=allowed)
        reports = [session.step(images(), cross_entropy) for _ in range(4)]
        assert max(report.peak_bytes for report in reports) <= budget_bytes
        assert session.plan.policy.fused
        assert session.plan.added_noise == 0.0
        done = Counter(row["method"] for row in session.explain() if ":conv2d" in row["site"])
        assert done["rederive"] >= 2
        assert not any(row["bits"] > 1 for row in session.explain())
        assert session.saved_bytes_peak < 0.8 * session.saved_bytes_plain
    plain = network()
    optimizer = sgd(plain)
    for report in reports:
        loss = cross_entropy(plain, images())
        assert report.loss == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Feedforward(nn.Module):
    """What transformers have between two normalisations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


def transforming() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), *(Feedforward(64) for _ in range(4)))


@needs_limit
def test_exact_training_derives_what_layers_read_from_what_activations_hold() -> None:
    """Of 32 MiB that four GELU and the layers behind them hold, 14 suffice without a code."""
    x = torch.randn(64, 64, 32, generator=torch.Generator().manual_seed(0))

    def squares(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    return_what_earlier_tests_held()
    model = transforming()
    with Session(model, sgd(model), "8GB", tolerance=0.0) as roomy:
        roomy.prepare(x, squares)
        assert roomy.profile is not None
        budget = planner.kept_peak_bytes(roomy.profile) - 14 * MIB
    model = transforming()
    with Session(model, sgd(model), budget, tolerance=0.0) as session:
        session.prepare(x, squares)
        measured, budget_bytes = (
            session._plan_controller.selector.profiles.fused,
            session.budget_bytes,
        )
        assert measured is not None
        assert budget_bytes is not None
        tellers = {str(each.teller) for each in measured.savings if each.teller}
        assert tellers == {f"{n}.activation:gelu#0[0]" for n in range(1, 5)}
        session.plan = planned.make_plan(measured, budget_bytes, policy="exact")
        reports = [session.step(x, squares) for _ in range(4)]
        assert max(report.peak_bytes for report in reports) <= budget_bytes
        done = {row["site"]: row["method"] for row in session.explain()}
        assert {done[teller] for teller in tellers} == {"keep"}
        assert {done[f"{n}.down:linear#0[0]"] for n in range(1, 5)} == {"rederive"}
        assert session.plan.added_noise == 0.0
        told = "fused as gelu + layer behind: as long as its input is kept"
        assert sum(told in line for line in session.plan.choices) == 4
    plain = transforming()
    optimizer = sgd(plain)
    for report in reports:
        loss = squares(plain, x)
        assert report.loss == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4096))


def next_words(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@needs_limit
def test_a_plan_with_fused_operators_has_no_logits() -> None:
    """One and a half tensors of logits less at the peak, and the same losses."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(4096, (16, 129), generator=generator)
    logits_bytes = 16 * 128 * 4096 * 4
    peaks, losses = {}, {}
    for budget in (None, "8GB"):
        model = language_model()
        with Session(model, sgd(model), budget) as session:
            if budget is not None:
                session.prepare(words, next_words)
                own = session.profile
                with session._keeper.unbounded():
                    measured = session._plan_controller.step_profiles.profile(
                        session._context(words, next_words), 10**10, own=own
                    )
                assert measured.gains_by_fusing
                assert [each.pattern for each in measured.fusions if each.operator == "linear"] == [
                    "linear + cross_entropy"
                ]
                assert (
                    planner.kept_peak_bytes(measured)
                    < planner.kept_peak_bytes(own) - 1.5 * logits_bytes
                )
                session.plan = planned.make_plan(measured, session.budget_bytes, policy="exact")
                assert "linear_cross_entropy" in session.plan.policy.operators
                assert any("logits never exist" in line for line in session.plan.choices)
                session._plan_controller.selector.profiles = Profiles(own, measured)
                session._keeper.open()
            reports = [session.step(words, next_words) for _ in range(3)]
            peaks[budget] = min(each.peak_bytes for each in reports) - session.baseline_bytes
            losses[budget] = [each.loss for each in reports]
    assert peaks["8GB"] < peaks[None] - 1.5 * logits_bytes
    assert losses["8GB"] == pytest.approx(losses[None], rel=1e-5)


@needs_limit
def test_a_resumed_session_goes_on_with_fused_operators() -> None:
    with prepared(0.3) as session:
        state = session.state_dict()
        assert state["profiles"]["fused"] is not None
    model = network()
    with Session(model, sgd(model), session.budget_bytes) as resumed:
        resumed.load_state_dict(state)
        selectors = (each._plan_controller.selector for each in (resumed, session))
        found, before = (each.profiles for each in selectors)
        assert found == before


def test_a_step_without_a_budget_is_fused_from_the_first_on_if_asked() -> None:
    found = {}
    for fused in (False, True):
        model = network()
        with Session(model, sgd(model), None, bits=2, fused=fused) as session:
            reports = [session.step(images(), cross_entropy) for _ in range(2)]
            patterns = [each.pattern for each in session._capture.fusions() if each.pattern]
            found[fused] = reports, patterns
    assert found[False][1] == []
    assert found[True][1] == ["batch_norm + relu"] * 5
    first, second = found[True][0]
    assert first.saved_bytes == second.saved_bytes  # the first step held what the others do
    assert first.loss == pytest.approx(found[False][0][0].loss, rel=1e-5)


def gradient(model: nn.Module) -> Tensor:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([each.double().flatten() for each in found])


def test_fused_operators_that_code_nothing_round_no_worse_than_pytorch_s() -> None:
    x, labels = images()
    plain, exact, fused = network(), network().double(), network()
    cross_entropy(plain, (x, labels)).backward()
    cross_entropy(exact, (x.double(), labels)).backward()
    with Session(fused, torch.optim.SGD(fused.parameters(), 0.0), None, fused=True) as session:
        session.step((x, labels), cross_entropy)
    truth = gradient(exact)
    # Where a value lies at a ReLU's zero, rounding decides; so plain's own error is the measure.
    assert (gradient(fused) - truth).norm() <= 2 * (gradient(plain) - truth).norm()
    for ours, theirs in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_resumed_session_fuses_in_its_first_step_as_the_one_before_would_have() -> None:
    model = network()
    optimizer = sgd(model)
    with Session(model, optimizer, None, bits=2, fused=True) as session:
        session.step(images(), cross_entropy)
        weights, moments = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
        state = session.state_dict()
        expected = [session.step(images(), cross_entropy) for _ in range(2)]
    fresh = network()
    fresh.load_state_dict(weights)
    fresh_optimizer = sgd(fresh)
    fresh_optimizer.load_state_dict(moments)
    with Session(fresh, fresh_optimizer, None, bits=2, fused=True) as resumed:
        resumed.load_state_dict(state)
        found = [resumed.step(images(), cross_entropy) for _ in range(2)]
    assert [each.saved_bytes for each in found] == [each.saved_bytes for each in expected]
    assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], 1e-5)


def test_under_a_budget_operators_are_the_planner_s_choice() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"fused=True under a budget.*leave fused out"):
        Session(model, sgd(model), "8GB", bits=2, fused=True)


@pytest.fixture
def tries_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind is tried, however fast or slow it is predicted to be on this machine."""
    monkeypatch.setattr(plan_autotuner, "WORTH_TRYING", math.inf)
    monkeypatch.setattr(plan_autotuner, "SHORTEST_MS", 0.0)


def settled(session: Session) -> list[tuple[Plan, StepReport]]:
    """Steps until nothing is tried any more, and two more: under which plan, and what it took."""
    ran = []
    after = 0
    while after < 2 and len(ran) < 60:
        after += session.is_settled
        trying = session._plan_controller.selector.autotuner.trial
        report = session.step(images(), cross_entropy)
        plan = trying.plan if trying else session.plan
        assert plan is not None
        ran.append((plan, report))
    assert session.is_settled
    return ran


@needs_limit
def test_the_best_plans_of_other_kinds_run_and_the_fastest_of_them_stays(
    tries_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_controller, "NEW_OPERATORS_BYTES", 0)  # so that none is refused
    with prepared(0.3) as session:
        assert not session.is_settled
        ran = settled(session)
        plan = session.plan
        assert plan is not None
        factors = session._plan_controller.selector.autotuner.factors
        assert len(factors) > 1
        assert f"the fastest of {len(factors)} tried" in plan.reason
        assert max(report.peak_bytes for _, report in ran) <= (session.budget_bytes or 0)
        # What backward holds is told of the plan that stayed, not of those that were tried.
        stayed = [report for each, report in ran if each.policy == plan.policy]
        assert len(stayed) < len(ran)
        assert session.saved_bytes_peak == max(report.saved_bytes for report in stayed)


@needs_limit
def test_a_plan_that_is_only_tried_is_refused_more_and_what_it_held_is_forgotten(
    tries_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_controller, "NEW_OPERATORS_BYTES", 100 * MIB)  # so that all are
    with prepared(0.3) as session:
        ran = settled(session)
        trials_ = session._plan_controller.selector.autotuner
        assert session.plan is not None
        assert trials_.factors.keys() == {plan_autotuner.plan_kind(session.plan)}
        assert session.plan.reason.count("the fastest of 1 tried") == 1
        assert session._keeper.spare_more_bytes == 0
        assert max(report.peak_bytes for _, report in ran) <= (session.budget_bytes or 0)
        stayed = [report for each, report in ran if each.policy == session.plan.policy]
        assert session.saved_bytes_peak == max(report.saved_bytes for report in stayed)


@needs_limit
def test_half_batches_decide_no_trial(tries_all: None) -> None:
    x, labels = images()
    with prepared(0.3) as session:
        for _ in range(60):
            session.step((x, labels), cross_entropy)
            if session._plan_controller.selector.autotuner.trial is not None:
                break
        trial = session._plan_controller.selector.autotuner.trial
        assert trial is not None
        for _ in range(3):
            session.step((x[:32], labels[:32]), cross_entropy)
        after = session._plan_controller.selector.autotuner.trial
        assert after is not None
        assert after.times_ms == trial.times_ms
        assert after.passed == trial.passed + 3


def test_hooks_that_only_look_are_seen_by_no_function_mode() -> None:
    seen: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        unseen()(lambda tensor: tensor.untyped_storage())(x)
        assert seen == []
        x.untyped_storage()
    assert seen == ["untyped_storage"]


@needs_limit
@pytest.mark.parametrize("is_penalised", [False, True])
def test_fused_operators_are_measured_with_second_derivatives_too(
    monkeypatch: pytest.MonkeyPatch, is_penalised: bool
) -> None:
    def penalised(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + slope.square().mean()

    monkeypatch.setattr(planner, "kept_parts_fit", lambda *_: False)  # fusing is always tried
    x, labels = images()
    batch, loss_fn = (x[:16], labels[:16]), penalised if is_penalised else cross_entropy
    model = network()
    expected = loss_fn(deepcopy(model), batch).item()
    with Session(model, sgd(model), "8GB") as session:
        session.prepare(batch, loss_fn)
        assert session.fusion_refusal == ""
        assert session._plan_controller.selector.profiles.fused is not None
        assert session.step(batch, loss_fn).loss == pytest.approx(expected, rel=0.02)
