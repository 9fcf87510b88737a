"""The process that ``daf bench pressure`` trains in.

Run as ``python -m daf_bench.memory.pressure_process JSON``.

Times are seconds of ``time.time()``, so that processes can be compared.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from daf.budget.limits import read_bounds
from daf.core.errors import BudgetError
from daf.memory import process_memory
from daf.memory.process_memory import MemoryTimeline
from daf.session.session import Session
from daf.torch_compat import compiler
from daf.training.data import load_data
from daf.training.models import find_model
from daf.training.task import Batch, BatchOrder, settle_goal
from daf_bench.harness.peer_methods import plain_step
from daf_bench.harness.subprocess_channel import serve
from daf_bench.harness.workload import MEMORY_FORMATS
from daf_bench.memory.pressure import PressureJob

_SAMPLE_EVERY_MS = 2.0


class _Squeeze:
    """Bytes that somebody else is pretended to hold."""

    def __init__(self) -> None:
        self._rate, self._total, self._start_s = 0.0, 0, 0.0

    def begin(self, rate: float, total: int) -> float:
        self._start_s = time.time()
        self._rate, self._total = rate, total
        return self._start_s

    def taken_bytes(self) -> int:
        return min(self._total, int(self._rate * (time.time() - self._start_s)))


class Work:
    """The model, its data and, once a budget was named, its session."""

    def __init__(self, job: PressureJob) -> None:
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        recipe, data = find_model(job.model), load_data(job.data)
        goal = settle_goal(job.model, recipe.goal, data)
        process_memory.warm_up()
        self.floor_bytes = process_memory.resident_bytes()
        torch.manual_seed(job.seed)
        layout = MEMORY_FORMATS["channels_last"]
        self._model: nn.Module = recipe.build(data.facts)
        self._model.to(memory_format=layout)  # type: ignore[call-overload]
        self._task = data.make_task(goal, self._model, memory_format=layout)
        self._order = BatchOrder(self._task.train_examples, job.batch_size, job.seed)
        compiler.keep_out()
        parameters = self._model.parameters()
        self._optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
        self._job = job
        self._index = 0
        self._session: Session | None = None
        self._asked_bytes = 0
        self._squeeze = _Squeeze()
        self._timeline = MemoryTimeline(_SAMPLE_EVERY_MS)
        self._timeline.__enter__()
        # What time.time() was when time.perf_counter() was nought.
        self._clock_s = time.time() - time.perf_counter()

    def answer(self, command: str, *words: str) -> dict[str, Any]:
        """Carry out one command; its words are numbers."""
        numbers = [float(word) for word in words]
        if command == "ready":
            return {"floor_bytes": self.floor_bytes}
        if command == "budget":
            return self._ask_budget(int(numbers[0]))
        if command == "simulate":
            return {"start_s": self._squeeze.begin(numbers[0], int(numbers[1]))}
        if command == "most":
            return {"most_bytes": min(bound.most_bytes for bound in read_bounds())}
        if command == "facts":
            return self._facts()
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "plain": self._plain,
            "step": self._step,
            "halve": self._halve,
        }
        return self._timed(steps[command], *numbers)

    def _ask_budget(self, nbytes: int) -> dict[str, Any]:
        self._asked_bytes = nbytes
        if self._session is None:
            self._session = Session(
                self._model,
                self._optimizer,
                lambda: self._asked_bytes - self._squeeze.taken_bytes(),
                seed=self._job.seed,
                baseline_bytes=self.floor_bytes,
            )
            self._session.prepare(self._batch(), self._task.loss)
        return {"budget_bytes": self._session.budget_bytes}

    def _timed(self, act: Callable[..., dict[str, Any]], *numbers: float) -> dict[str, Any]:
        start_s = time.time()
        try:
            found = act(*numbers)
        except BudgetError as error:
            return {"lost": str(error)}
        self._index += 1
        end_s = time.time()
        return {"start_s": start_s, "end_s": end_s, "examples": self._job.batch_size, **found}

    def _plain(self) -> dict[str, Any]:
        process_memory.reset_peak()
        start_s = time.perf_counter()
        loss = plain_step(self._model, self._optimizer, self._batch(), self._task.loss)
        step_ms = 1000 * (time.perf_counter() - start_s)
        return {"loss": loss, "step_ms": step_ms, "peak_bytes": process_memory.peak_bytes()}

    def _step(self, loss_fn: Callable[..., Any] | None = None) -> dict[str, Any]:
        assert self._session is not None
        report = self._session.step(self._batch(), loss_fn or self._task.loss)
        return {
            "loss": report.loss,
            "step_ms": report.step_ms,
            "peak_bytes": report.charged_peak_bytes,
            "budget_bytes": report.budget_bytes,
            "evicted_bytes": report.evicted_bytes,
            "micro_batch": report.micro_batch,
            "policy": self._session.plan.policy.name if self._session.plan else None,
        }

    def _halve(self, nbytes: float) -> dict[str, Any]:
        """A step in whose middle, between forward and backward, another thread asks for less."""
        told: dict[str, Any] = {}

        def lower() -> None:
            assert self._session is not None
            told["asked_s"], told["asked_bytes"] = time.time(), int(nbytes)
            self._asked_bytes = int(nbytes)
            self._session.budget = self._session.budget  # the function is asked now
            told["acted_ms"] = 1000 * (time.time() - told["asked_s"])

        def loss_fn(model: nn.Module, batch: Batch) -> Any:
            loss = self._task.loss(model, batch)
            if not told:
                thread = threading.Thread(target=lower)
                thread.start()
                thread.join()
            return loss

        return self._step(loss_fn) | told

    def _facts(self) -> dict[str, Any]:
        assert self._session is not None
        start_s = self._clock_s + self._timeline.start_s
        samples = [(start_s + at, size) for at, size in self._timeline.samples]
        budgets = [
            asdict(change) | {"at_s": self._clock_s + change.time_s}
            for change in self._session.budget_history
        ]
        return {"samples": samples, "budgets": budgets}

    def _batch(self) -> Batch:
        generator = np.random.default_rng([self._job.seed, self._index])
        return self._task.train_batch(self._order.indices(self._index), generator)


if __name__ == "__main__":
    serve(Work(PressureJob(**json.loads(sys.argv[1]))).answer)
