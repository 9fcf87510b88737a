"""One process that trains a workload from nothing: plainly, or in a session with a budget.

``python -m daf_bench.start.child JSON`` is that process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.core.errors import BudgetError
from daf.core.step_report import StepReport
from daf.memory import process_memory
from daf.training.task import Indices
from daf_bench.harness.peer_methods import plain_step
from daf_bench.harness.subprocess_channel import serve
from daf_bench.workloads import built_workload
from daf_bench.workloads.trainable import Loaded, Trainable, momentum

TWO_LAYERS = "two layers"
RUN_STEPS = 20  # of a whole short run
STEADY_STEPS = 10  # at least, of which the steady step is the median
MOST_UNSETTLED = 40  # steps after the run, while a session still tries plans


@dataclass(frozen=True, slots=True)
class Start:
    """What one process trains, within which budget (None: plainly), and where it keeps caches."""

    workload: str
    folder: str | None
    is_small: bool
    budget_bytes: int | None = None
    cache: str = ""


class _Blobs:
    """Points about one of ten centres, to be told apart."""

    train_examples = 1024

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> tuple[Tensor, ...]:
        labels = torch.as_tensor(np.asarray(indices)) % 10
        noise = torch.as_tensor(generator.standard_normal((len(labels), 64)), dtype=torch.float32)
        return noise + F.one_hot(labels, 64), labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


def _two_layers() -> Loaded:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    return Loaded(64, "", make_model, lambda _: _Blobs(), momentum)


def built(start: Start) -> Trainable:
    """The workload, ready to train."""
    if start.workload == TWO_LAYERS:
        return _two_layers().build()
    return built_workload(start.workload, start.folder, is_small=start.is_small)


def answer(work: Trainable, start: Start, command: str, steps: str) -> dict[str, Any]:
    """Carry out ``train STEPS``."""
    if command != "train":
        raise ValueError(f"unknown command {command!r}; there is train")
    process_memory.reset_peak()
    if start.budget_bytes is None:
        return _plainly(work, int(steps))
    try:
        return _in_session(work, start.budget_bytes, int(steps))
    except BudgetError as error:
        return {"least_bytes": error.least_bytes}


def _plainly(work: Trainable, steps: int) -> dict[str, Any]:
    taken_ms = []
    for step in range(1 + steps):
        batch, start_s = work.batch(step), time.perf_counter()
        plain_step(work.model, work.optimizer, batch, work.task.loss)
        taken_ms.append(1000.0 * (time.perf_counter() - start_s))
    peak_bytes = process_memory.peak_bytes()
    return {"first_ms": taken_ms[0], "plain_ms": median(taken_ms[1:]), "peak_bytes": peak_bytes}


def _in_session(work: Trainable, budget_bytes: int, steps: int) -> dict[str, Any]:
    """Time from the session's making on: to the first step's end, of a short run, and steady.

    Its code is imported before.
    ``steps`` count as steady once the session tries no other plan, or ``MOST_UNSETTLED`` later.
    """
    make_session = daf.Session
    batch, start_s = work.batch(0), time.perf_counter()
    session = make_session(work.model, work.optimizer, budget_bytes)
    session.step(batch, work.task.loss)
    first_ms = 1000.0 * (time.perf_counter() - start_s)
    run, reports = [first_ms], []
    while len(run) < RUN_STEPS:
        run.append(_timed(session, work, len(run), reports))
    later, unsettled = [], 0
    while not session.is_settled and unsettled < MOST_UNSETTLED:
        unsettled += 1
        later.append(_timed(session, work, RUN_STEPS + unsettled, reports))
    steady = [_timed(session, work, RUN_STEPS + unsettled + 1 + k, reports) for k in range(steps)]
    after_ms = sum(run[1:]) + sum(later) + sum(steady)
    return {
        "first_ms": first_ms,
        "run_ms": sum(run),
        "steady_ms": median(steady),
        "steps_until_settled": RUN_STEPS + unsettled,
        "is_settled": session.is_settled,
        "measuring_share": sum(each.measuring_ms for each in reports) / after_ms,
        "began_warm": session.began_warm,
        "peak_bytes": session.peak_bytes,
        "micro_batch": reports[-1].micro_batch,
    }


def _timed(session: daf.Session, work: Trainable, step: int, reports: list[StepReport]) -> float:
    batch, start_s = work.batch(step), time.perf_counter()
    reports.append(session.step(batch, work.task.loss))
    return 1000.0 * (time.perf_counter() - start_s)


if __name__ == "__main__":
    START = Start(**json.loads(sys.argv[1]))
    os.environ["DAF_CACHE"] = START.cache
    WORK = built(START)
    serve(lambda command, steps: answer(WORK, START, command, steps))
