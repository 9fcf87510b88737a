"""Trains a sizable case within a budget near the least, under whatever plans the session makes.

What is compared later is written to files: copies of every step's gradients would take more than
the budget leaves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import daf
from daf.core.errors import BudgetError
from daf.memory import process_memory
from daf.planning import planner
from daf_bench.conformance.case import Work, seed_all
from daf_bench.conformance.compare import Step, Trace, gradients_of
from daf_bench.conformance.ways import (
    LOUD_STEPS,
    QUIET_STEPS,
    ROOM_BYTES,
    Outcome,
    Recorder,
    acted_in,
    begin_step,
    random_state,
)

# The budget lies between the least and the one that keeps everything, with what two sessions of one
# process differ in.
TIGHT_SHARE, SPARE_BYTES = 0.2, 16 * 2**20


class _FileRecorder(Recorder):
    """Takes steps down in files, until ``trace`` reads them."""

    def __init__(self, work: Work, folder: Path) -> None:
        super().__init__(work)
        self._folder = folder
        self._files: list[Path] = []

    def note(self, loss: float) -> None:
        """Write a step."""
        buffers = dict(self.work.model.named_buffers())
        step = (loss, gradients_of(self.work, copied=False), buffers, random_state())
        self._files.append(self._folder / f"{len(self._files)}.pt")
        torch.save(step, self._files[-1])

    def trace(self) -> Trace:
        """Read all steps."""
        self.steps = [Step(*torch.load(each, weights_only=True)) for each in self._files]
        return super().trace()


def train_tightly(fresh: Callable[[], Work], rate: float, seed: int) -> Outcome:
    """Train within a budget near the least one, in a session with plans of its own."""
    room_bytes, proof_ms = _room_bytes(fresh(), rate)
    gc.collect()
    work = fresh()
    budget = process_memory.resident_bytes() + room_bytes
    with TemporaryDirectory() as folder:
        recorder = _FileRecorder(work, Path(folder))
        try:
            acted, above = _trained(recorder, rate, seed, budget)
        except BudgetError as error:  # it names a budget that must do
            if error.least_bytes is None:
                raise
            gc.collect()
            acted, above = _trained(recorder, rate, seed, error.least_bytes + SPARE_BYTES)
        told = {"above_bytes": above, "proof_ms": proof_ms}
        return Outcome(recorder.trace(), acted, told)


def _room_bytes(work: Work, rate: float) -> tuple[int, float | None]:
    """Return the tight budget's bytes beside what the process holds before a step.

    And the time that proofs took with room to spare (ms).
    """
    roomy = process_memory.resident_bytes() + ROOM_BYTES
    with daf.Session(work.model, work.make_optimizer(rate), roomy, tolerance=0) as session:
        session.prepare(work.batch, work.loss)
        profile, least = session.profile, session.least_feasible_bytes()
    assert profile is not None
    assert least is not None
    spare = int(TIGHT_SHARE * max(0, planner.kept_peak_bytes(profile) - least)) + SPARE_BYTES
    # The floor may hold what plain training left, which a session gives back to the system.
    return least - profile.resident_bytes + spare, getattr(session, "proof_ms", None)


def _trained(recorder: Recorder, rate: float, seed: int, budget_bytes: int) -> tuple[set[str], int]:
    """Train; return which levers acted, and the bytes above the budget."""
    work, acted, overrun_bytes = recorder.work, set[str](), 0
    optimizer = work.make_optimizer(rate)
    with daf.Session(work.model, optimizer, budget_bytes, tolerance=0) as session:
        session.prepare(work.batch, work.loss)
        seed_all(seed)
        work.reset()
        for step in range(QUIET_STEPS + LOUD_STEPS):
            batch = begin_step(work, optimizer, step, rate)
            report = session.step(batch, work.loss)
            recorder.note(report.loss)
            acted |= acted_in(session, report, batch)
            overrun_bytes = max(overrun_bytes, report.overrun_bytes)
        return acted, max(overrun_bytes, session.peak_bytes - budget_bytes)
