"""One way to train a workload, in a process of its own: plain, by hand, or in a session.

``python -m daf.bench.contender JSON`` is that process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daf.bench.child import Child, serve
from daf.bench.peers import plain_step
from daf.bench.static import accumulating_step, checkpoint_blocks
from daf.bench.workloads import find_workload
from daf.bench.workloads.sources import Sources
from daf.errors import BudgetError
from daf.memory import compiler, measure
from daf.plan import Plan
from daf.session import Session
from daf.step_report import StepReport


@dataclass(frozen=True, slots=True)
class Way:
    """How a workload is trained. ``budget_bytes`` given: in a session; else without any of DAF.

    ``checkpointed`` is the share of the blocks that are checkpointed by hand, ``pieces``
    how many the batch is cut into by hand. ``gradient_file`` receives the first
    step's gradient, float32, parameter after parameter.
    """

    workload: str
    folder: str | None = None
    is_small: bool = False
    budget_bytes: int | None = None
    policy: str | None = None
    tolerance: float | None = None
    checkpointed: float = 0.0
    pieces: int = 1
    gradient_file: str | None = None
    seed: int = 0


class Contender(Child):
    """The parent's handle on one way."""

    def __init__(self, way: Way) -> None:
        super().__init__("daf.bench.contender", asdict(way), f"{way.workload}, {way.policy}")

    def prepare(self) -> dict[str, Any]:
        """floor_bytes and, in a session, the first plan, or a refusal and its ``least_bytes``."""
        return self.ask("prepare")

    def step(self) -> dict[str, Any]:
        """loss, step_ms, peak_bytes and saved_bytes; or ``raised``, a budget's late refusal."""
        return self.ask("step")

    def facts(self) -> dict[str, Any]:
        """The prediction, the session's peak, saved bytes, and the plan that stands now."""
        return self.ask("facts")


class Work:
    """What the process does with commands."""

    def __init__(self, way: Way) -> None:
        sources = Sources(Path(way.folder) if way.folder else None)
        loaded = find_workload(way.workload).load(sources, way.is_small)
        measure.warm_up()
        compiler.keep_out()
        self.floor_bytes = measure.resident_bytes()
        self._way = way
        self._work = loaded.build(way.seed)
        self._index = 0
        self._predicted_bytes: int | None = None
        measure.reset_peak()
        self._session = self._start_session()
        model, blocks = self._work.model, self._work.blocks
        checkpoint_blocks(model, blocks, way.checkpointed)

    def answer(self, command: str) -> dict[str, Any]:
        """Carry out one command."""
        if command == "prepare":
            return {"floor_bytes": self.floor_bytes, **self._prepare()}
        if command == "step":
            return self._step()
        return self._facts()

    def _start_session(self) -> Session | None:
        way = self._way
        if way.budget_bytes is None:
            return None
        return Session(
            self._work.model,
            self._work.optimizer,
            way.budget_bytes,
            seed=way.seed,
            floor_bytes=self.floor_bytes,
            **session_options(way.policy, way.tolerance),
        )

    def _prepare(self) -> dict[str, Any]:
        if self._session is None:
            return {}
        start_s = time.perf_counter()
        try:
            plan = self._session.prepare(self._work.batch(0), self._work.task.loss)
        except BudgetError as error:
            return {"refusal": str(error), "least_bytes": error.least_bytes}
        return {
            "prepare_ms": 1000 * (time.perf_counter() - start_s),
            "first_plan": plan_summary(plan),
        }

    def _step(self) -> dict[str, Any]:
        batch = self._work.batch(self._index)
        start_s = time.perf_counter()
        try:
            found = self._trained(batch)
        except BudgetError as error:
            return {"raised": str(error)}
        found = {"step_ms": 1000 * (time.perf_counter() - start_s), **found}
        if self._index == 0 and self._way.gradient_file is not None:
            write_gradient(self._work.model, Path(self._way.gradient_file))
        self._index += 1
        return found

    def _trained(self, batch: Any) -> dict[str, Any]:
        work = self._work
        if self._session is not None:
            return _reported(self._session.step(batch, self._loss))
        measure.reset_peak()  # a session does so itself, and remembers
        if self._way.pieces == 1:
            loss = plain_step(work.model, work.optimizer, batch, work.task.loss)
        else:
            loss = accumulating_step(work.model, work.optimizer, work.task.loss, self._way.pieces)(
                batch
            )
        return {"loss": loss, "peak_bytes": measure.peak_bytes()}

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        """The task's loss; the prediction is written down before the first full-size step runs."""
        if self._predicted_bytes is None and self._session is not None:
            self._predicted_bytes = self._session.predicted_peak_bytes
        return self._work.task.loss(model, batch)

    def _facts(self) -> dict[str, Any]:
        session = self._session
        if session is None:
            return {}
        return {
            "predicted_peak_bytes": self._predicted_bytes,
            # Profiling included, which the steps' own peaks are not.
            "session_peak_bytes": session.peak_bytes,
            "saved_bytes_plain": session.saved_bytes_plain,
            "saved_bytes_peak": session.saved_bytes_peak,
            "plan": plan_summary(session.plan) if session.plan else None,
            "methods": methods_used(session),
        }


def session_options(policy: str | None, tolerance: float | None) -> dict[str, Any]:
    """What was asked, by name; what was not is left to the session."""
    asked = {"policy": policy, "tolerance": tolerance}
    return {name: value for name, value in asked.items() if value is not None}


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The plan in a few plain values."""
    return {
        "policy": plan.policy.name,
        "micro_batch": plan.micro_batch,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_step_ms": plan.predicted_step_ms,
        "bound_ms": plan.bound_ms,
        "replayed": len(plan.policy.replayed),
        "release_gradients": plan.release_gradients,
        "reason": plan.reason,
    }


def methods_used(session: Session) -> dict[str, int]:
    """Sites by what was really done at them in the last step: ``rotated 2`` and so on."""
    rows = session.explain()
    return dict(Counter(f"{row['method']} {row['bits'] or ''}".strip() for row in rows))


def _reported(report: StepReport) -> dict[str, Any]:
    return {
        "loss": report.loss,
        "step_ms": report.step_ms,
        "peak_bytes": report.peak_bytes,
        "saved_bytes": report.saved_bytes,
        "micro_batch": report.micro_batch,
        "evicted_bytes": report.evicted_bytes,
    }


def write_gradient(model: nn.Module, path: Path) -> None:
    """Every gradient as float32 in the order of ``parameters``; zeros where there is none."""
    with path.open("wb") as file:
        for parameter in model.parameters():
            if parameter.requires_grad:
                found = parameter.grad
                gradient = torch.zeros_like(parameter) if found is None else found
                gradient.detach().float().contiguous().numpy().tofile(file)


if __name__ == "__main__":
    serve(Work(Way(**json.loads(sys.argv[1]))).answer)
