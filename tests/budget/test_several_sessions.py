"""Several sessions in one process: one account, one step at a time, nothing left behind."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from daf._native import allocator as native
from daf_bench.faults.interrupts import InterruptedAt
from torch import Tensor, nn

from daf.core.errors import BudgetError, ClosedSessionError, UnitError, UnknownNameError
from daf.memory import process_memory
from daf.memory.owners import owners
from daf.memory.recycling_allocator import unsupported_reason
from daf.session import budget_controller
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
MB = 10**6
pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    gc.collect()
    threads = set(threading.enumerate())
    blocks = sizes_of_large_blocks()
    yield
    gc.collect()
    assert owners.living() == []
    assert native.settings() == (None, None)
    assert not native.is_installed()
    end_s = time.monotonic() + 20
    while set(threading.enumerate()) - threads and time.monotonic() < end_s:
        time.sleep(0.01)
    assert set(threading.enumerate()) - threads == set()
    gc.collect()
    assert sizes_of_large_blocks() == blocks


def sizes_of_large_blocks() -> list[int]:
    return sorted(size for _, size, *_ in native.live_blocks())


def network(seed: int = 0) -> nn.Sequential:
    """Saves 70 MB for 4,096 rows."""
    torch.manual_seed(seed)
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid()) * 4
    return nn.Sequential(nn.Linear(16, 256), *smooth, nn.Linear(256, 4))


def rows(count: int = 4096, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    return torch.randn(count, 16, generator=generator), labels


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def session_for(budget: object, model: nn.Module | None = None, **options: object) -> Session:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Session(model, optimizer, budget, tolerance=0, sensitivity=False, **options)


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """Libraries take memory of their own in a process's first steps."""
    for room in (8000, 200):  # above what is resident by then
        with session_for(process_memory.resident_bytes() + room * MB) as session:
            session.step(rows(), cross_entropy)


def tight() -> int:
    """A budget under which a step must be cut or replayed, and the limit is in force."""
    return process_memory.resident_bytes() + 60 * MB


def gradients_of(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def plain_gradients(model: nn.Module, batch: Batch) -> Tensor:
    """PyTorch's own, in parts: the limit in force is another session's perhaps."""
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    for inputs, labels in zip(batch[0].split(128), batch[1].split(128), strict=True):
        (cross_entropy(twin, (inputs, labels)) * (len(labels) / len(batch[1]))).backward()
    return gradients_of(twin)


def is_right(session: Session, batch: Batch) -> bool:
    """Step; is the gradient plain's?"""
    expected = plain_gradients(session.model, batch)
    session.step(batch, cross_entropy)
    return torch.allclose(gradients_of(session.model), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("closed_first", [0, 1])
def test_the_least_budget_is_every_session_s_as_long_as_it_lives(closed_first: int) -> None:
    batch, budget = rows(), tight()
    sessions = [session_for(budget), session_for(budget + 900 * MB)]
    for session in sessions:
        assert is_right(session, batch)
    assert [each.budget_bytes for each in sessions] == [budget, budget]
    assert sessions[1].budget_history[-1].reason == budget_controller.ANOTHERS
    limit = native.settings()[1]
    assert limit is not None
    assert limit < budget
    sessions[closed_first].close()
    left = sessions[1 - closed_first]
    assert is_right(left, batch)
    assert left.budget_bytes == (budget, budget + 900 * MB)[1 - closed_first]
    left.close()


def test_a_budget_too_low_for_another_session_says_whose_it_is() -> None:
    batch, large = rows(), nn.Sequential(nn.Linear(16, 4_000_000), nn.Linear(4_000_000, 4))
    with session_for(process_memory.resident_bytes() + 40 * MB) as narrow:
        narrow.step((batch[0][:64], batch[1][:64]), cross_entropy)
        with session_for("8GB", large) as wide, pytest.raises(BudgetError) as found:
            wide.step(batch, cross_entropy)
        assert any("another session" in note for note in found.value.__notes__)


def test_a_dropped_session_leaves_nothing_behind() -> None:
    session = session_for(tight())
    session.step(rows(), cross_entropy)
    assert native.settings()[1] is not None
    del session
    gc.collect()
    assert native.settings() == (None, None)
    assert torch.ones(300 * MB, dtype=torch.uint8)[-1].item() == 1


def test_a_closed_session_refuses_and_sets_nothing_again() -> None:
    batch, session = rows(), session_for(tight())
    session.step(batch, cross_entropy)
    state = session.state_dict()
    session.close()
    session.close()
    weights = [each.detach().clone() for each in session.model.parameters()]
    for go_on in (
        lambda: session.step(batch, cross_entropy),
        lambda: session.prepare(batch, cross_entropy),
        lambda: session.load_state_dict(state),
        lambda: setattr(session, "budget", tight()),
    ):
        with pytest.raises(ClosedSessionError, match="make another"):
            go_on()
    assert session.settings == []
    assert all(map(torch.equal, weights, session.model.parameters()))
    with session_for(tight(), session.model) as another:
        another.load_state_dict(state)
        assert is_right(another, batch)


def test_sessions_of_several_threads_get_plain_s_gradients() -> None:
    budget, found, problems = tight() + 60 * MB, {}, []

    def train(seed: int, asked: int | None) -> None:
        try:
            with session_for(asked, network(seed)) as session:
                found[seed] = all(is_right(session, rows(2048, seed)) for _ in range(3))
        except BaseException as problem:
            problems.append(problem)

    asked = (budget, budget + 500 * MB, None, budget + 40 * MB)
    threads = [threading.Thread(target=train, args=each) for each in enumerate(asked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert found == dict.fromkeys(range(4), True)


@pytest.mark.parametrize("place", [3, 40, 300, 900, 2000, 5000, 9000, 14000])
def test_an_interrupted_step_leaves_the_process_and_the_model_as_found(place: int) -> None:
    batch, model = rows(512), network()
    with session_for(tight(), model) as session:
        session.step(batch, cross_entropy)
        before = [each.detach().clone() for each in model.parameters()]
        interrupted = False
        try:
            with InterruptedAt(place):
                session.step(batch, cross_entropy)
        except KeyboardInterrupt:
            interrupted = True
        assert torch._C._len_torch_function_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        after = [each.detach() for each in model.parameters()]
        changed = [not torch.equal(*each) for each in zip(before, after, strict=True)]
        assert all(changed) or not any(changed)
        assert all(changed) or interrupted
        assert is_right(session, batch)
        with pytest.raises(RuntimeError, match="allocate memory"):
            torch.ones(500 * MB, dtype=torch.uint8)


@pytest.mark.parametrize("place", [50, 4000, 20_000, 60_000])
def test_an_interrupted_first_step_can_be_repeated(place: int) -> None:
    batch = rows(512)
    with session_for(tight()) as session:
        try:
            with InterruptedAt(place):
                session.step(batch, cross_entropy)
        except KeyboardInterrupt:
            pass
        assert is_right(session, batch)


def test_gradients_of_a_step_interrupted_before_its_update_are_not_the_user_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = rows(512)
    with session_for(tight()) as session:
        session.step(batch, cross_entropy)

        def interrupted(_needed_bytes: int = 0) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(session._keeper, "unbounded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.step(batch, cross_entropy)
        assert is_right(session, batch)


def once(change: Callable[[], None], undo: Callable[[], None]) -> Callable[..., Tensor]:
    """A loss around whose first forward pass the budget changes."""
    first = threading.Lock()  # a retry restores simpler things that a loss closes over

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if not first.acquire(blocking=False):
            return cross_entropy(model, batch)
        change()
        try:
            return cross_entropy(model, batch)
        finally:
            undo()

    return loss


@pytest.mark.parametrize("after", [None, "8GB"])
def test_a_budget_lifted_or_raised_while_memory_is_refused_lets_the_step_go_on(
    after: str | None,
) -> None:
    batch, model = rows(), network()
    with session_for(tight(), model) as session:
        session.step(batch, cross_entropy)
        expected = plain_gradients(model, batch)

        def lower() -> None:
            session.budget = "50MB"

        def lift() -> None:
            session.budget = after

        changing = once(lower, lift)
        session.step(batch, changing)
        assert torch.allclose(gradients_of(model), expected, rtol=1e-3, atol=1e-7)
        assert session.budget == after
        assert is_right(session, batch)


def test_a_budget_that_moves_at_every_look_leaves_a_bounded_history() -> None:
    asked = iter(range(10**6))
    session = session_for(lambda: 4 * 10**9 + next(asked))
    with session:
        for _ in range(budget_controller.MOST_CHANGES + 50):
            session._budget_controller.look(False)
        assert len(session.budget_history) == budget_controller.MOST_CHANGES
        assert session.budget_history[-1].budget_bytes == session.budget_bytes


def test_whoever_reads_a_budget_finds_it_in_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    with session_for("8GB") as session:
        session.step(rows(64), cross_entropy)
        rebound = session._keeper.rebound

        def watched(budget_bytes: int | None) -> int:
            seen.append((session.budget_bytes, session.budget_history[-1].budget_bytes))
            return rebound(budget_bytes)

        monkeypatch.setattr(session._keeper, "rebound", watched)
        session.budget = "7GB"  # as when the watcher's thread is at it
        assert seen == [(8 * 10**9, 8 * 10**9)]
        assert (session.budget_bytes, session.budget_history[-1].budget_bytes) == (7 * 10**9,) * 2


PROGRAM = """
import os, time, torch
from torch import nn
from daf import Session
from daf._native import allocator as native
from daf.memory.process_memory import resident_bytes
from daf.torch_compat import compiler
compiler.keep_out()  # which the first optimizer would import, in seconds
MB = 10**6
torch.manual_seed(0)
smooth = (nn.GELU(), nn.Tanh(), nn.SiLU()) * 4
model = nn.Sequential(nn.Linear(16, 256), *smooth, nn.Linear(256, 4))
batch = torch.randn(4096, 16), torch.randint(0, 4, (4096,))
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
def session_for(budget, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Session(model, optimizer, budget, tolerance=0, sensitivity=False, **options)
for room in (8000, 200):  # above what is resident by then: first steps import and load
    with session_for(resident_bytes() + room * MB) as warm: warm.step(batch, loss)
def in_child(work):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally: os._exit(status)
    return pid

def a_child_is_not_bounded_and_may_train_in_the_session_that_it_inherits():
    session = session_for(resident_bytes() + 60 * MB)
    session.step(batch, loss)
    assert native.settings()[1] is not None
    def work():
        torch.ones(400 * MB, dtype=torch.uint8)
    assert os.waitpid(in_child(work), 0)[1] == 0
    def train():
        session.step(batch, loss)
        assert native.settings()[1] is not None
        session.close()
        assert native.settings() == (None, None)
    assert os.waitpid(in_child(train), 0)[1] == 0
    session.step(batch, loss)
    session.close()

def a_budget_of_the_tree_leaves_to_children_what_they_take():
    budget = resident_bytes() + 500 * MB
    session = session_for(budget, scope="tree")
    session.step(batch, loss)
    assert session.budget_bytes == budget
    def work():
        held = torch.ones(100 * MB, dtype=torch.uint8)
        time.sleep(60)
    child = in_child(work)
    end = time.time() + 30
    while session.budget_bytes > budget - 95 * MB and time.time() < end: time.sleep(0.02)
    assert budget - 260 * MB < session.budget_bytes <= budget - 95 * MB, session.budget_bytes
    assert "child processes" in session.budget_history[-1].reason
    session.step(batch, loss)
    os.kill(child, 9)
    os.waitpid(child, 0)
    while session.budget_bytes < budget and time.time() < end: time.sleep(0.02)
    assert session.budget_bytes == budget
    session.close()

a_child_is_not_bounded_and_may_train_in_the_session_that_it_inherits()
a_budget_of_the_tree_leaves_to_children_what_they_take()
print("ok")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_children_are_not_bounded_may_train_and_count_in_a_budget_of_the_tree() -> None:
    """In a process of its own, which has no threads; both parts in one, since it starts slowly."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_what_is_swapped_out_counts_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with session_for("8GB") as session:
        before, own = session.held_bytes(), process_memory._own_bytes

        def swapped(*fields: str) -> list[int]:
            found = zip(fields, own(*fields), strict=True)
            return [123 * MB if field == "VmSwap" else each for field, each in found]

        monkeypatch.setattr(process_memory, "_own_bytes", swapped)
        assert session.held_bytes() - before == pytest.approx(123 * MB, abs=20 * MB)
        report = session.step(rows(64), cross_entropy)
        assert report.swapped_bytes == 123 * MB
        assert report.peak_bytes > before + 100 * MB


def test_what_no_plan_can_do_is_refused_before_the_first_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnknownNameError, match="5-bit"):
        Session(model, optimizer, "8GB", bits=5)
    with pytest.raises(ValueError, match="bits=True"):
        Session(model, optimizer, None, bits=True)
    with Session(model, optimizer, None, bits=5, baseline_bytes=0) as session:
        assert session.baseline_bytes == 0
        assert session.step(rows(64), cross_entropy).budget_bytes is None
        with pytest.raises(UnknownNameError, match="5-bit"):
            session.budget = "8GB"
        with pytest.raises(UnitError):
            session.budget_bytes = 0.5
        assert session.budget is None


@pytest.mark.parametrize("scope", ["Tree", "", None])
def test_an_unknown_scope_is_refused_by_the_constructor(scope: object) -> None:
    with pytest.raises(ValueError, match="scope is 'process'"):
        session_for("8GB", scope=scope)
