"""A session whose codes have a cap of their own, or share the budget's last bytes."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.errors import BudgetError, PoolFullError, UnitError
from daf.core.policy import coded_policy
from daf.core.step_report import StepReport
from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason
from daf.memory.statistics import stats
from daf.pool.paged_pool import PagedStore
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
needs_limit = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def network(blocks: int = 2, channels: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(blocks):
        convolution = nn.Conv2d(channels, channels, 3, padding=1)
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), convolution]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def images(count: int = 16, size: int = 32) -> Batch:
    torch.manual_seed(1)
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def session_for(model: nn.Module, budget: str | int | None = None, **options: Any) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Session(model, optimizer, budget, **options)


def pool_of(session: Session) -> PagedStore:
    store = session._capture._store
    assert isinstance(store, PagedStore)
    return store


def pool_bytes(bits: int) -> int:
    """What the codes of a step take where nothing bounds them."""
    session = session_for(network(), bits=bits)
    report = session.step(images(), cross_entropy)
    assert report.evicted_bytes == 0
    return pool_of(session).statistics().held_peak_bytes


def test_under_its_own_cap_a_session_trains_on_with_fewer_planes() -> None:
    cap, batch = int(0.7 * pool_bytes(4)), images()
    session = session_for(network(), bits=4, pool_bytes=cap)
    assert session.pool_bytes == cap
    reports = [session.step(batch, cross_entropy) for _ in range(30)]
    assert pool_of(session).statistics().held_peak_bytes <= cap
    assert all(report.evicted_bytes > 0 for report in reports)
    assert session.evicted_bytes == sum(report.evicted_bytes for report in reports)
    assert sum(row["evicted_bytes"] for row in session.explain()) >= reports[-1].evicted_bytes
    assert reports[-1].loss < 0.9 * reports[0].loss
    state = json.loads(json.dumps(session.state_dict()))
    resumed = session_for(network(), bits=4)
    resumed.load_state_dict(state)
    assert resumed.evicted_bytes == session.evicted_bytes


def test_a_cap_below_one_bit_is_refused_and_nothing_is_touched() -> None:
    model, batch = network(), images()
    session = session_for(model, bits=2, pool_bytes="30KB")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(PoolFullError, match=r"cap 30000.*raise the cap"):
        session.step(batch, cross_entropy)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    session.pool_bytes = "8MB"
    report = session.step(batch, cross_entropy)
    assert report.evicted_bytes == 0
    assert report.loss == cross_entropy(network(), batch).item()


def test_a_cap_halved_in_mid_step_acts_at_once_and_is_reported() -> None:
    session, batch = session_for(network(), bits=4), images()
    seen: list[int] = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss = cross_entropy(model, batch)
        seen.append(pool_of(session).live_bytes)
        session.pool_bytes = seen[0] // 2
        seen.append(pool_of(session).live_bytes)
        return loss

    report = session.step(batch, loss_fn)
    assert seen[1] <= seen[0] // 2
    assert report.evicted_bytes >= seen[0] - seen[1] - 4096
    assert math.isfinite(report.loss)


def test_numbers_that_are_no_caps_are_refused() -> None:
    with pytest.raises(UnitError):
        session_for(network(), bits=2, pool_bytes="many")
    session = session_for(network(), bits=2)
    with pytest.raises(UnitError):
        session.pool_bytes = 0
    assert session.pool_bytes is None


def test_codes_that_do_not_fit_their_cap_are_tried_under_a_tighter_plan() -> None:
    batch, cap = images(), int(0.5 * pool_bytes(8))
    with session_for(network(), "8GB", pool_bytes=cap) as session:
        plan = session.prepare(batch, cross_entropy)
        refused = replace(plan, policy=coded_policy(8))
        session.plan, session._plan_controller.selector.first = refused, None
        report = session.step(batch, cross_entropy)
        assert session.plan.predicted_peak_bytes < refused.predicted_peak_bytes
        assert pool_of(session).statistics().held_peak_bytes <= cap
    assert report.loss == cross_entropy(network(), batch).item()


@needs_limit
def test_the_pool_counts_in_the_account_that_the_budget_bounds() -> None:
    gc.collect()  # pools of other tests' sessions leave the account before it is read
    session, charged = session_for(network(), bits=4), []
    before = stats()["external_bytes.current"]

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss = cross_entropy(model, batch)
        charged.append(stats()["external_bytes.current"] - before)
        return loss

    session.step(images(), loss_fn)
    now = pool_of(session).statistics()
    assert (
        charged[0] >= pool_of(session).statistics().held_peak_bytes - now.metadata_bytes - 4 * 4096
    )
    assert stats()["external_bytes.current"] - before == now.free_bytes


@needs_limit
def test_at_the_budget_planes_go_before_the_step_is_refused() -> None:
    """Budgets from roomy to hopeless: somewhere between, the step finishes with fewer planes."""
    batch, least_refused, reports = images(64, 64), 0, dict[int, StepReport]()
    model = network(5)
    fixed = torch.optim.SGD(model.parameters(), lr=0.0)  # so that every step has the same loss
    with Session(model, fixed, "8GB", bits=4) as session:
        plan = session.prepare(batch, cross_entropy)
        session._plan_controller.selector.first = None
        for room in range(112, 70, -4):
            session.plan = plan
            session._keeper.flush()
            session.budget_bytes = process_memory.resident_bytes() + room * 1_000_000
            try:
                reports[room] = session.step(batch, cross_entropy)
            except BudgetError:
                least_refused = room
                break
            assert session.peak_bytes <= session.budget_bytes
        assert len({report.loss for report in reports.values()}) == 1
    evicted = {room: report.evicted_bytes for room, report in reports.items()}
    assert least_refused
    assert evicted[max(evicted)] == 0
    assert evicted[min(evicted)] > 10**6


@needs_limit
def test_pages_that_the_budget_refuses_are_the_budget_s_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with session_for(network(), "8GB") as session:
        session.step(images(), cross_entropy)
        hopeless = process_memory.resident_bytes() + 8 * 10**6

        def run(*_: Any, **__: Any) -> float:
            session.budget = hopeless
            pool_of(session).allocate_planes(2**30, 1)  # 128 MB
            return 0.0

        monkeypatch.setattr(session._runner.retries.gradient, "run", run)
        with pytest.raises(BudgetError, match="needs at least") as caught:
            session.step(images(), cross_entropy)
    assert (caught.value.least_bytes or 0) > hopeless
