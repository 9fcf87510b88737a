"""One attempt to train a random model; ``python -m daf_bench.memory.survival_process JSON``.

Its outcome is one JSON object on standard output; the system's kill leaves none.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import Tensor, nn

from daf.core.errors import BudgetError
from daf.core.step_report import StepReport
from daf.memory import process_memory
from daf.session.session import Session
from daf.torch_compat import compiler
from daf_bench.harness.peer_methods import plain_step
from daf_bench.memory.random_events import Events, Move, draw_events
from daf_bench.memory.random_models import Built, build, draw
from daf_bench.memory.survival import Attempt


def attempt(asked: Attempt) -> dict[str, Any]:
    """Train some steps, plain or within the budget: finished, refused, or raised while training."""
    process_memory.warm_up()
    compiler.keep_out()
    floor, mapped = process_memory.resident_bytes(), process_memory.mapped_bytes()
    work, events = build(draw(asked.seed)), draw_events(asked.seed, asked.steps)
    if asked.budget_bytes is None:
        found = _plain(work, asked, events)
    else:
        found = _Bounded(work, asked.budget_bytes, floor, events).run(asked)
    return {"floor_bytes": floor, "own_bytes": floor - mapped, **found}


def _plain(work: Built, asked: Attempt, events: Events) -> dict[str, Any]:
    process_memory.reset_peak()
    for _ in range(asked.steps):
        plain_step(work.model, work.optimizer, work.batch, _loss_of(work, events))
    return {"outcome": "finished", "peak_bytes": process_memory.peak_bytes()}


def _loss_of(work: Built, events: Events) -> Any:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if events.inside_bytes:
            np.ones(events.inside_bytes, np.uint8)
        return work.loss(model, batch)

    return loss


class _Bounded:
    """One run in a session, with what happens beside its steps."""

    def __init__(self, work: Built, budget_bytes: int, floor: int, events: Events) -> None:
        self._work, self._budget, self._floor, self._events = work, budget_bytes, floor, events
        self._loss = _loss_of(work, events)
        self._step_s = 0.1
        self._counts = {"bursts": 0, "bursts_refused": 0, "steps_refused": 0}

    def run(self, asked: Attempt) -> dict[str, Any]:
        """Prepare, then train; a step may be refused only while its budget is a lower one."""
        with self._session(asked) as session:
            try:
                session.prepare(self._work.batch, self._loss)
            except BudgetError as error:
                return {"outcome": "refused", "least_bytes": error.least_bytes, "words": str(error)}
            predicted, above = session.predicted_peak_bytes, 0
            for index in range(asked.steps):
                try:
                    above = max(above, self._step(session, index))
                except BudgetError as error:
                    return {"outcome": "raised", "words": str(error)}
            return {
                "outcome": "finished",
                "peak_bytes": session.peak_bytes,
                "above_bytes": above,
                "predicted_peak_bytes": predicted,
                "micro_batch": session.plan.micro_batch if session.plan else None,
                **self._counts,
            }

    def _session(self, asked: Attempt) -> Session:
        return Session(
            self._work.model,
            self._work.optimizer,
            self._budget,
            seed=asked.seed,
            baseline_bytes=self._floor,
            release_gradients="auto" if self._events.releases else False,
            cache=False,  # what an earlier attempt measured is not there on a machine of its own
        )

    def _step(self, session: Session, index: int) -> int:
        """Run one step; return by how much it passed the highest budget in force meanwhile."""
        self._burst(session, index)
        moves = [each for each in self._events.moves if each.step == index]
        start_s = time.perf_counter()
        with ExitStack() as moving:
            for move in moves:
                self._begin(session, move, moving)
            try:
                report: StepReport | None = session.step(self._work.batch, self._loss)
            except BudgetError:
                if not moves:
                    raise
                report = None
        self._step_s = time.perf_counter() - start_s
        session.budget = self._budget
        if report is None:
            self._counts["steps_refused"] += 1
            return self._step(session, -1)  # whole again, the step works
        at_once = [each.share for each in moves if not each.delay]
        highest = self._moved(min(at_once)) if at_once else self._budget
        held = max(report.peak_bytes, highest + report.overrun_bytes if report.overrun_bytes else 0)
        return max(0, held - highest)

    def _begin(self, session: Session, move: Move, moving: ExitStack) -> None:
        """Move the budget now, or from another thread within the step."""

        def fall() -> None:
            time.sleep(move.delay * self._step_s)
            session.budget = self._moved(move.share)

        if not move.delay:
            session.budget = self._moved(move.share)
            return
        thread = threading.Thread(target=fall)
        thread.start()
        moving.callback(thread.join)

    def _moved(self, share: float) -> int:
        return int(self._floor + share * (self._budget - self._floor))

    def _burst(self, session: Session, index: int) -> None:
        """Make an array of NumPy's between steps; it fits, or it is refused."""
        for _, share in (each for each in self._events.bursts if each[0] == index):
            nbytes = int(share * (self._budget - self._floor))
            room = self._budget - session.held_bytes()
            self._counts["bursts"] += 1
            try:
                np.ones(nbytes, np.uint8)
            except MemoryError:
                self._counts["bursts_refused"] += 1
                if nbytes < room / 2:
                    raise


if __name__ == "__main__":
    print(json.dumps(attempt(Attempt(**json.loads(sys.argv[1])))))
