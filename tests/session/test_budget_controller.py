"""A budget that moves while a session trains: at once in mid-step, by another plan afterwards."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_up import MB, Tree
from torch import Tensor, nn

from daf.budget.governor import Governor
from daf.core.errors import BudgetError, PlatformError, UnitError
from daf.core.policy import coded_policy
from daf.memory import process_memory
from daf.memory.glibc import return_free_memory
from daf.memory.process_limit import SPARE_BYTES, SPARE_FRACTION, MemoryKeeper
from daf.memory.recycling_allocator import unsupported_reason
from daf.memory.statistics import stats
from daf.pool.paged_pool import PagedStore
from daf.session.budget_controller import BudgetController
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
needs_limit = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def network() -> nn.Sequential:
    """Saves 200 MB for 64 images of 64 pixels, in tensors of 17 MB."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def images(count: int = 64, size: int = 64) -> Batch:
    torch.manual_seed(1)
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def session_for(model: nn.Module, budget: Any, **options: Any) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Session(model, optimizer, budget, sensitivity=False, **options)


class Meanwhile:
    """A loss function that does something to the session once, on another thread, in mid-step."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.done = False
        self.attempts = 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.attempts += 1
        loss = cross_entropy(model, batch)
        if not self.done:
            self.done = True
            thread = threading.Thread(target=self._act)
            thread.start()
            thread.join()
        return loss


def pool_of(session: Session) -> PagedStore:
    store = session._capture._store
    assert isinstance(store, PagedStore)
    return store


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


# --- in mid-step ----------------------------------------------------------------------------


def tall() -> nn.Sequential:
    """Many layers whose codes together outweigh what a few tensors in flight take."""
    torch.manual_seed(0)
    layers = [part for _ in range(60) for part in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def rows() -> Batch:
    torch.manual_seed(1)
    return torch.randn(4096, 128), torch.randint(0, 10, (4096,))


def budget_for_account(limit_bytes: int) -> int:
    """The budget under which the allocator's account may hold this much."""
    other_bytes = process_memory.resident_bytes() - stats()["held_bytes.current"]
    return int((limit_bytes + other_bytes + SPARE_BYTES) / (1 - SPARE_FRACTION))


@needs_limit
def test_a_budget_lowered_from_another_thread_in_mid_step_takes_planes_at_once() -> None:
    model, batch = tall(), rows()
    with session_for(model, "8GB", bits=4) as session:
        session.step(batch, cross_entropy)
        seen: dict[str, int] = {}

        def squeeze() -> None:
            session.budget = "7GB"  # frees first what only saves time
            return_free_memory()  # earlier tests' leftovers would make room otherwise
            # Neither recycled blocks nor what blocks have beyond what was asked: both go first.
            live = stats()["live_bytes.current"] + stats()["external_bytes.current"]
            seen["pool before"] = pool_of(session).live_bytes
            session.budget = budget_for_account(live - 4 * MB)
            seen["pool after"] = pool_of(session).live_bytes
            seen["account"] = stats()["held_bytes.current"]
            seen["limit"] = session._keeper._claim.limit_bytes

        halve = Meanwhile(squeeze)
        report = session.step(batch, halve)
        assert session.budget_bytes is not None
        assert process_memory.resident_bytes() <= session.budget_bytes
        change = session.budget_history[-1]
    assert seen["pool before"] - seen["pool after"] > 2 * MB
    assert seen["account"] <= seen["limit"]
    assert halve.attempts == 1  # it finished; nothing was done twice
    assert math.isfinite(report.loss)
    assert report.evicted_bytes >= change.evicted_bytes > 2 * MB
    assert change.budget_bytes == report.budget_bytes
    assert change.reason == "as asked"


@needs_limit
@pytest.mark.parametrize("room_mb", [pytest.param(150, marks=pytest.mark.thorough), 115])
def test_a_step_whose_budget_falls_is_finished_or_tried_again_and_updates_once(
    room_mb: int,
) -> None:
    batch = images()
    model, twin = network(), network()
    with session_for(model, "8GB") as session:
        session.prepare(batch, cross_entropy)
        assert session.plan is not None
        assert session.plan.policy.name == "plain"
        room = process_memory.resident_bytes() + room_mb * MB

        def squeeze() -> None:
            session.budget = room

        halved = Meanwhile(squeeze)
        updates: list[int] = []
        session.optimizer.register_step_post_hook(lambda *_: updates.append(1))
        # From the middle of the model on, so that much is still to be asked for.
        hook = model[6].register_forward_hook(lambda *_: squeeze() if not halved.done else None)
        report = session.step(batch, halved)
        hook.remove()
        assert len(updates) == 1
        assert process_memory.resident_bytes() <= room
        reports = [session.step(batch, cross_entropy) for _ in range(3)]
        assert session.plan.policy.name != "plain"
        assert all(each.peak_bytes <= room for each in reports)
    # The loss of the step that was tried again is plain's, and statistics were updated once.
    assert report.loss == cross_entropy(twin, batch).item()
    assert int(model[1].num_batches_tracked) == 4
    assert reports[-1].loss < report.loss


@needs_limit
def test_a_budget_that_nothing_fits_leaves_the_parameters_and_names_the_least() -> None:
    model, batch = network(), images(32)
    with session_for(model, "8GB") as session:
        session.step(batch, cross_entropy)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        random_state = torch.get_rng_state()
        session._keeper.flush()  # what is recycled would be room
        impossible = process_memory.resident_bytes() + 8 * MB
        halved = Meanwhile(lambda: setattr(session, "budget", impossible))
        hook = model[3].register_forward_hook(lambda *_: setattr(session, "budget", impossible))
        with pytest.raises(BudgetError, match="needs at least") as caught:
            session.step(batch, halved)
        hook.remove()
        assert caught.value.least_bytes is not None
        assert caught.value.least_bytes > impossible
        for name, value in model.state_dict().items():
            assert torch.equal(before[name], value), name
        assert torch.equal(random_state, torch.get_rng_state())
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(BudgetError):
            session.step(batch, cross_entropy)  # and again, between steps
        session.budget = "8GB"
        assert math.isfinite(session.step(batch, cross_entropy).loss)
        assert session.plan is not None
        assert session.plan.policy.name == "plain"


# --- between steps --------------------------------------------------------------------------


@needs_limit
def test_the_plan_tightens_with_the_budget_and_relaxes_when_it_is_restored() -> None:
    model, batch = network(), images(32)
    with session_for(model, "8GB") as session:
        session.step(batch, cross_entropy)
        policies = []
        for budget in (process_memory.resident_bytes() + 62 * MB, "8GB"):
            session.budget = budget
            peaks = [session.step(batch, cross_entropy).peak_bytes for _ in range(2)]
            assert session.plan is not None
            policies.append(session.plan.policy.name)
            assert all(peak <= session.budget_bytes for peak in peaks)
        assert policies[0] != "plain"
        assert policies[1] == "plain"
        assert [each.reason for each in session.budget_history] == ["as asked"] * 3


def test_a_budget_may_come_later_and_be_lifted() -> None:
    model, batch = network(), images(8)
    with session_for(model, None) as session:
        session.step(batch, cross_entropy)
        assert session.settings == []
        session.budget = "8GB"
        assert session.step(batch, cross_entropy).budget_bytes == 8 * 10**9
        assert session.profile is not None
        assert session.settings != []
        session.budget = None
        assert session.step(batch, cross_entropy).budget_bytes is None
        assert session.settings == []


def test_a_resumed_session_plans_anew_if_its_budget_is_another() -> None:
    model, batch = network(), images(8)
    with session_for(model, "8GB", bits=4) as session:
        session.step(batch, cross_entropy)
        state = json.loads(json.dumps(session.state_dict()))
        profile = session.profile
    with session_for(model, "8GB", bits=4) as same:
        same.load_state_dict(state)
        kept = same.plan
        same.step(batch, cross_entropy)
        assert same.plan is kept
    with session_for(model, "7GB", bits=4) as other:
        other.load_state_dict(state)
        other.step(batch, cross_entropy)
        assert other.plan is not kept
        assert other.profile == profile
        assert "7.00 GB" in other.plan.reason


def test_what_is_no_budget_is_refused_and_the_one_before_stays() -> None:
    model = network()
    with session_for(model, "8GB") as session:
        with pytest.raises(UnitError):
            session.budget = "a lot"
        assert session.budget == "8GB"
        assert len(session.budget_history) == 1


def test_a_gpu_model_is_refused_a_budget_later_too() -> None:
    model = nn.Linear(2, 2, device="meta")
    session = session_for(model, None)
    with pytest.raises(PlatformError, match="a budget for a model on meta"):
        session.budget = "1GB"


# --- limits that move by themselves ---------------------------------------------------------


@needs_limit
def test_a_function_is_watched_in_mid_step() -> None:
    model, batch = tall(), rows()
    answer: list[Any] = ["8GB"]
    with session_for(model, lambda: answer[0], bits=4) as session:
        session.step(batch, cross_entropy)

        def squeeze() -> None:
            live = stats()["held_bytes.current"] - stats()["recycled_bytes.current"]
            answer[0] = budget_for_account(live - 3 * MB)
            wait_for(lambda: session.budget_bytes == answer[0])

        report = session.step(batch, Meanwhile(squeeze))
        assert report.budget_bytes == answer[0]
        assert session.budget_history[-1].evicted_bytes > 0


def wait_for(what: Callable[[], bool], patience_s: float = 20.0) -> None:
    end_s = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.002)


def test_a_group_s_limit_that_falls_is_followed_by_the_thread(tree: Tree) -> None:
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=299, maximum_mb=1000)
    given: list[int] = []

    def give_back(wanted: int) -> int:
        given.append(wanted)
        return wanted

    keeper, lowered = MemoryKeeper(give_back), []
    governor = Governor("900MB", tree.system())
    controller = BudgetController(governor, keeper, lambda: lowered.append(1))
    assert controller.begin_step() == 900 * MB
    tree.v2_group("/app", used_mb=299, maximum_mb=20)
    wait_for(lambda: controller.budget_bytes == 20 * MB)
    controller.close()
    assert lowered == [1]
    # Nothing is recycled here, so what the process really holds above the budget is asked for.
    assert len(given) == 1
    assert given[0] == pytest.approx(process_memory.resident_bytes() - 20 * MB, abs=50 * MB)
    assert [each.budget_bytes for each in controller.history] == [900 * MB, 20 * MB]
    assert controller.history[-1].evicted_bytes == given[0]
    assert controller.history[-1].reason == "the limit /sys/fs/cgroup/app/memory.max"


def governor_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "daf-governor"]


def test_the_thread_runs_only_under_a_budget_and_ends_with_the_session() -> None:
    model, batch = network(), images(2)
    with session_for(model, None) as session:
        session.step(batch, cross_entropy)
        assert governor_threads() == []
    session = session_for(model, "auto", bits="exact")
    assert governor_threads() == []
    session.step(batch, cross_entropy)
    assert len(governor_threads()) == 1
    session.close()
    assert governor_threads() == []


def test_a_session_that_is_forgotten_takes_its_thread_along() -> None:
    session = session_for(network(), "8GB", bits="exact")
    session.step(images(2), cross_entropy)
    (thread,) = governor_threads()
    session._keeper.close()  # which would outlive it, as the process's own settings
    del session
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_trouble_in_the_user_s_function_comes_out_of_the_next_step() -> None:
    trouble = threading.Event()

    def budget() -> str:
        if trouble.is_set():
            raise LookupError("the user's own")
        return "8GB"

    batch = images(2)
    with session_for(network(), budget, bits="exact") as session:
        session.step(batch, cross_entropy)
        trouble.set()
        with pytest.raises(LookupError):
            session.step(batch, cross_entropy)
        trouble.clear()
        assert session.step(batch, cross_entropy).budget_bytes == 8 * 10**9


def test_auto_trains_and_says_what_it_follows() -> None:
    with session_for(network(), "auto") as session:
        report = session.step(images(4), cross_entropy)
        assert report.budget_bytes is not None
        assert report.peak_bytes <= report.budget_bytes
        assert "left to others" in session.budget_history[0].reason


# --- the keeper's part ----------------------------------------------------------------------


@needs_limit
def test_a_limit_lowered_while_nothing_may_fail_holds_afterwards() -> None:
    keeper = MemoryKeeper()
    keeper.open()
    try:
        start = process_memory.resident_bytes()
        keeper.bound(start + 400 * MB, start + 400 * MB)
        with keeper.unbounded():
            keeper.rebound(start + 50 * MB)
            held = torch.ones(100 * MB, dtype=torch.uint8)
        assert int(held[-1]) == 1
        del held
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.ones(100 * MB, dtype=torch.uint8)
        keeper.rebound(None)
        assert int(torch.ones(100 * MB, dtype=torch.uint8)[-1]) == 1
    finally:
        keeper.close()


@needs_limit
def test_a_budget_raised_in_mid_step_lets_the_step_have_more() -> None:
    keeper = MemoryKeeper()
    keeper.open()
    try:
        start = process_memory.resident_bytes()
        keeper.bound(start + 50 * MB, start + 50 * MB)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.ones(100 * MB, dtype=torch.uint8)
        keeper.rebound(start + 400 * MB)
        assert int(torch.ones(100 * MB, dtype=torch.uint8)[-1]) == 1
    finally:
        keeper.close()


@needs_limit
def test_threads_that_ask_while_it_trains_never_leave_a_wrong_limit() -> None:
    """Budgets come from two threads at random; every step ends within the budget in force."""
    batch, stop = images(16), threading.Event()
    with session_for(network(), "8GB", bits=2) as session:
        plan = session.prepare(batch, cross_entropy)
        session.plan = replace(plan, policy=coded_policy(2))
        base = process_memory.resident_bytes()

        def ask(step_mb: int) -> None:
            room_mb = 150
            while not stop.wait(0.003):
                room_mb = 100 + (room_mb + step_mb) % 300
                session.budget = base + room_mb * MB

        threads = [threading.Thread(target=ask, args=(step,)) for step in (37, 101)]
        for thread in threads:
            thread.start()
        try:
            losses = [session.step(batch, cross_entropy).loss for _ in range(6)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert all(map(math.isfinite, losses))
        assert session.budget_history[-1].budget_bytes == session.budget_bytes
        session.step(batch, cross_entropy)
        assert session._keeper._claim.limit_bytes < session.budget_bytes
        assert stats()["held_bytes.current"] <= session._keeper._claim.limit_bytes
