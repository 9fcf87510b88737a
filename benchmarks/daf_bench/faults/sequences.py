"""Random sequences of opening, stepping, interrupting, dropping and closing sessions.

Up to five sessions and a ``track`` live at once; each operation runs on one of four threads, and
some run on all of them together. After every operation the process is compared with a model of it:
what is redirected, the limit in force, glibc's thresholds, the watching threads. Every gradient is
compared with plain PyTorch's.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from random import Random
from typing import Any

import torch
from daf._native import allocator as native
from torch import Tensor, nn

from daf import Session
from daf.core.errors import ClosedSessionError
from daf.memory import glibc, process_memory
from daf.memory.allocation_log import track
from daf_bench.faults.interrupts import InterruptedAt

MOST_SESSIONS, LANES = 5, 4
LEAST_LENGTH, MOST_LENGTH = 6, 16
MOST_LINES = 30_000  # of DAF's in a first step
ROOMS_MB = (70, 90, 140, 400)  # above what the process holds; a whole step takes 90
RELATIVE_ERROR = 1e-3  # parts of a batch add up in another order
PATIENCE_S = 20.0
REFUSED = "can't allocate memory"  # PyTorch's words
Batch = tuple[Tensor, Tensor]


def run_sequences(count: int, seed: int) -> dict[str, int]:
    """Run ``count`` sequences; return how often each thing was tried, and what differed.

    ``sequences_tried``, ``steps_tried``, ``interrupts_tried`` and so on; ``refused``: memory, as it
    must be sometimes. ``differences`` from the model of the process, ``gradients_wrong``,
    ``errors`` (unexpected exceptions) and ``hangs`` are what must not be.
    """
    counts: Counter[str] = Counter(
        sequences_tried=0, differences=0, gradients_wrong=0, errors=0, hangs=0
    )
    with ExitStack() as stack:
        gc.freeze()  # every collection would search what the libraries made
        stack.callback(gc.unfreeze)
        lanes = [stack.enter_context(ThreadPoolExecutor(1, f"lane-{i}")) for i in range(LANES)]
        for lane in lanes:
            lane.submit(int).result()
        for index in range(count):
            _Sequence(Random(f"{seed}-{index}"), lanes, counts).run()
            counts["sequences_tried"] += 1
    return dict(counts)


class _Sequence:
    """One sequence, and the model of the process: what lives, under which budgets."""

    def __init__(
        self, random: Random, lanes: list[ThreadPoolExecutor], counts: Counter[str]
    ) -> None:
        self._random = random
        self._lanes = lanes
        self._counts = counts
        self._sessions: list[Session] = []
        self._closed: list[Session] = []
        self._tracks: list[ExitStack] = []
        self._track_limits: list[int | None] = []
        self._threads = set(threading.enumerate())

    def run(self) -> None:
        """Run it; leave nothing."""
        operations: dict[Callable[[], None], float] = {
            self._open: 4,
            self._step: 5,
            self._interrupt: 3,
            self._step_all_at_once: 2,
            self._ask: 1,
            self._close: 1,
            self._drop: 1,
            self._step_closed: 0.5,
            self._enter_track: 0.7,
            self._leave_track: 0.7,
        }
        for _ in range(self._random.randint(LEAST_LENGTH, MOST_LENGTH)):
            (operation,) = self._random.choices([*operations], [*operations.values()])
            self._attempt(operation)
            self._compare(operation.__name__)
        while self._sessions or self._tracks:
            ends = [self._close, self._drop] if self._sessions else []
            ends += [self._leave_track] if self._tracks else []
            self._attempt(self._random.choice(ends))
        self._closed.clear()
        self._compare_end()

    # --- what is done -----------------------------------------------------------------------

    def _open(self) -> None:
        if len(self._sessions) < MOST_SESSIONS:
            model = _model(self._random.randrange(1000))
            self._sessions.append(self._on_a_lane(lambda: _session(model, self._draw_budget())))

    def _step(self) -> None:
        if self._sessions:
            self._note_step(self._on_a_lane(self._stepping(self._random.choice(self._sessions))))

    def _step_all_at_once(self) -> None:
        chosen = self._random.sample(self._sessions, min(LANES, len(self._sessions)))
        pairs = zip(self._lanes, chosen, strict=False)
        started = [lane.submit(self._stepping(session)) for lane, session in pairs]
        wait(started, 6 * PATIENCE_S)  # where one is refused, too: the others step on
        for each in sorted(started, key=_has_raised):
            self._note_step(_result(each))

    def _stepping(self, session: Session) -> Callable[[], bool]:
        """Return what steps and says whether the gradient is plain's."""
        batch = _batch(self._random.choice((512, 4096)), self._random.randrange(1000))
        return lambda: _is_right(session, batch)

    def _note_step(self, is_right: bool) -> None:
        self._counts["steps_tried"] += 1
        self._counts["gradients_wrong"] += not is_right

    def _interrupt(self) -> None:
        """Interrupt a step; the model is as before it or after it."""
        if not self._sessions:
            return
        session = self._random.choice(self._sessions)
        line = int(math.exp(self._random.uniform(0, math.log(MOST_LINES))))
        batch = _batch(512, self._random.randrange(1000))
        before = _weights(session.model)
        has_come = self._on_a_lane(lambda: _is_interrupted(session, batch, line))
        changed = [
            not torch.equal(*each) for each in zip(before, _weights(session.model), strict=True)
        ]
        self._differ(any(changed) and not all(changed), "an interrupted step is half-applied")
        self._counts["interrupts_tried"] += has_come

    def _ask(self) -> None:
        if self._sessions:
            self._random.choice(self._sessions).budget = self._draw_budget()
            self._counts["budgets_set"] += 1

    def _close(self) -> None:
        if self._sessions:
            session = self._take()
            self._on_a_lane(session.close)
            self._closed.append(session)
            self._counts["closed"] += 1

    def _drop(self) -> None:
        if self._sessions:
            self._take()
            self._on_a_lane(gc.collect)
            self._counts["dropped"] += 1

    def _step_closed(self) -> None:
        if not self._closed:
            return
        session, batch = self._random.choice(self._closed), _batch(64, 0)
        try:
            session.step(batch, _loss)
        except ClosedSessionError:
            return
        self._differ(True, "a closed session stepped")

    def _enter_track(self) -> None:
        limit = self._random.choice((None, process_memory.resident_bytes() + 10**9))
        entered = ExitStack()
        entered.enter_context(track(limit=limit))
        self._tracks.append(entered)
        self._track_limits.append(limit)

    def _leave_track(self) -> None:
        if self._tracks:
            index = self._random.randrange(len(self._tracks))
            self._track_limits.pop(index)
            self._on_a_lane(self._tracks.pop(index).close)

    def _take(self) -> Session:
        return self._sessions.pop(self._random.randrange(len(self._sessions)))

    def _draw_budget(self) -> int | None:
        if self._random.random() < 0.25:
            return None
        return process_memory.resident_bytes() + self._random.choice(ROOMS_MB) * 10**6

    def _on_a_lane(self, work: Callable[[], Any]) -> Any:
        return _result(self._random.choice(self._lanes).submit(work))

    def _attempt(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except TimeoutError:
            self._counts["hangs"] += 1
            raise
        except MemoryError:  # a budget that other sessions, or this step, have outgrown
            self._counts["refused"] += 1
        except Exception as error:  # whatever else it is, it must not be
            if REFUSED in str(error):  # a session without a budget, under another's
                self._counts["refused"] += 1
                return
            self._counts["errors"] += 1
            print(f"{operation.__name__}: {type(error).__name__}: {error}", file=sys.stderr)

    # --- what should be ---------------------------------------------------------------------

    def _compare(self, after: str) -> None:
        """Compare the process with what lives."""
        held = [each for each in self._sessions if each.settings]
        limits = [each for each in self._track_limits if each is not None]
        # A session bounds the process once it has a plan.
        planned = [each.budget_bytes for each in held if each.plan is not None]
        budgets = [each for each in planned if each is not None]
        limit = native.settings()[1]
        self._differ(native.is_installed() != bool(held or self._tracks), f"{after}: redirected")
        self._differ(glibc.returns_freed_blocks() != bool(held), f"{after}: glibc's thresholds")
        self._differ(limit is not None and not (limits or budgets), f"{after}: a limit is left")
        self._differ(bool(limits) and (limit is None or limit > min(limits)), f"{after}: no limit")
        too_high = limit is not None and bool(budgets) and limit > min(budgets)
        self._differ(too_high, f"{after}: the limit is above the least budget")
        self._differ(torch._C._len_torch_function_stack() > 0, f"{after}: a mode is left")

    def _compare_end(self) -> None:
        gc.collect()
        self._compare("at the end")
        end_s = time.monotonic() + PATIENCE_S
        while (left := set(threading.enumerate()) - self._threads) and time.monotonic() < end_s:
            time.sleep(0.005)
        names = ", ".join(each.name for each in left)
        self._differ(bool(left), f"threads are left: {names}")
        self._differ(native.settings() != (None, None), "at the end: something is set")

    def _differ(self, differs: bool, what: str) -> None:
        if differs:
            self._counts["differences"] += 1
            print(what, file=sys.stderr)


def _has_raised(started: Future[Any]) -> bool:
    return started.done() and started.exception() is not None


def _result(started: Future[Any]) -> Any:
    return started.result(6 * PATIENCE_S)


def _model(seed: int) -> nn.Sequential:
    """Saves 17 MB for 4,096 rows in each of five layers."""
    generator = torch.Generator().manual_seed(seed)
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid(), nn.GELU())
    model = nn.Sequential(nn.Linear(16, 1024), *smooth, nn.Linear(1024, 4))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / math.sqrt(each.shape[-1]))
    return model


def _session(model: nn.Module, budget: int | None) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Session(model, optimizer, budget, tolerance=0, sensitivity=False)


def _batch(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (rows,), generator=generator)
    return torch.randn(rows, 16, generator=generator), labels


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def _is_right(session: Session, batch: Batch) -> bool:
    """Step; True if the gradient is plain PyTorch's. Plain's is taken in parts, as it may fit no
    limit in force."""
    plain = copy.deepcopy(session.model)
    plain.zero_grad(set_to_none=True)
    for inputs, labels in zip(batch[0].split(256), batch[1].split(256), strict=True):
        (_loss(plain, (inputs, labels)) * (len(labels) / len(batch[1]))).backward()
    expected = _gradient(plain)
    del plain
    session.step(batch, _loss)
    found = _gradient(session.model)
    return float((found - expected).norm() / expected.norm()) < RELATIVE_ERROR


def _is_interrupted(session: Session, batch: Batch, line: int) -> bool:
    try:
        with InterruptedAt(line):
            session.step(batch, _loss)
    except KeyboardInterrupt:
        return True
    return False
