"""One way to train a workload, in a process of its own: plain, by hand, or in a session.

``python -m daf_bench.harness.method_runner JSON`` is that process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daf.core.errors import BudgetError, PlatformError
from daf.core.plan import Plan
from daf.core.step_report import StepReport
from daf.memory import process_memory
from daf.session.session import Session
from daf.torch_compat import compiler
from daf_bench.doors.loops import DoorLoop
from daf_bench.harness.initial_weights import FirstState
from daf_bench.harness.peer_methods import Peer, Setting, make_peer
from daf_bench.harness.saved_bytes import SavedBytes
from daf_bench.harness.subprocess_channel import RETURNING_FREED_BLOCKS, Child, serve
from daf_bench.workloads import find_workload
from daf_bench.workloads.sources import Sources


@dataclass(frozen=True, slots=True)
class Way:
    """How a workload is trained. With a budget or bits: in a session; else without any of DAF.

    ``peer`` and its ``amount`` name the way without DAF (``peers.make_peer``).
    ``gradient_file`` receives the first step's gradient, float32, parameter after parameter.
    ``keeps_first_state``: for ``settled_gradient``, which goes back to the first weights.
    ``batch_size`` None is the workload's own. ``cuts_statistics`` lets micro-batches have batch
    statistics of their own, which computes something else; ``cuts`` False trains the whole batch.
    """

    workload: str
    folder: str | None = None
    is_small: bool = False
    batch_size: int | None = None
    budget_bytes: int | None = None
    bits: int | None = None
    fused: bool = False
    policy: str | None = None
    tolerance: float | None = None
    cuts_statistics: bool = False
    cuts: bool = True
    peer: str = "plain"
    amount: float = 0.0
    return_freed_blocks: bool = False
    gradient_file: str | None = None
    keeps_first_state: bool = False
    seed: int = 0
    door: str | None = None  # through which the budget is given (``doors.loops``); None: a step

    @property
    def in_session(self) -> bool:
        """Whether DAF trains."""
        return self.budget_bytes is not None or self.bits is not None


class Contender(Child):
    """The parent's handle on one way."""

    def __init__(self, way: Way) -> None:
        more = RETURNING_FREED_BLOCKS if way.return_freed_blocks else {}
        label = f"{way.workload}, {way.policy if way.in_session else way.peer}"
        super().__init__(
            "daf_bench.harness.method_runner", asdict(way), label, environment=os.environ | more
        )

    def prepare(self) -> dict[str, Any]:
        """floor_bytes and, in a session, the first plan; or a refusal and its ``least_bytes``."""
        return self.ask("prepare")

    def step(self) -> dict[str, Any]:
        """loss, step_ms, peak_bytes, and of a session saved_bytes and is_settled; or ``raised``,
        a late refusal.
        """
        return self.ask("step")

    def facts(self) -> dict[str, Any]:
        """The prediction, the session's peak, saved bytes, and the plan that stands now."""
        return self.ask("facts")

    def settled_gradient(self, path: Path) -> dict[str, Any]:
        """Write the first batch's gradient at the first weights, as training is done by now.

        Returns what was held for backward, where it can be counted from outside. Ask for it
        last: the weights are those of training no more.
        """
        return self.ask("gradient", path)


class Work:
    """What the process does with commands."""

    def __init__(self, way: Way) -> None:
        sources = Sources(Path(way.folder) if way.folder else None)
        loaded = find_workload(way.workload).load(sources, way.is_small)
        if way.batch_size is not None:
            loaded = replace(loaded, batch_size=way.batch_size)
        process_memory.warm_up()
        compiler.keep_out()
        self.floor_bytes = process_memory.resident_bytes()
        self._way = way
        self._examples = loaded.batch_size
        self._work = loaded.build(way.seed)
        self._first = FirstState(self._work.model) if way.keeps_first_state else None
        self._index = 0
        self._predicted_bytes: int | None = None
        self._peer: Peer | None = None
        self._door: DoorLoop | None = None
        process_memory.reset_peak()
        self._session = self._start_session()

    def answer(self, command: str, *words: str) -> dict[str, Any]:
        """Carry out one command."""
        if command == "prepare":
            return {"floor_bytes": self.floor_bytes, **self._prepare()}
        if command == "step":
            return self._step()
        if command == "gradient":
            return self._settled_gradient(Path(" ".join(words)))
        return self._facts()

    def _start_session(self) -> Session | None:
        way = self._way
        if not way.in_session or way.door is not None:
            return None
        return Session(
            self._work.model,
            self._work.optimizer,
            way.budget_bytes,
            bits=way.bits,
            fused=way.fused,
            seed=way.seed,
            baseline_bytes=self.floor_bytes,
            allow_batchnorm_split=way.cuts_statistics,
            split="auto" if way.cuts else False,
            **session_options(way.policy, way.tolerance),
        )

    def _prepare(self) -> dict[str, Any]:
        start_s = time.perf_counter()
        try:
            if self._session is None:
                self._peer = self._make_peer()
                return {}
            plan = self._session.prepare(self._work.batch(0), self._work.task.loss)
        except (BudgetError, PlatformError) as error:
            return {"refusal": str(error), "least_bytes": getattr(error, "least_bytes", None)}
        return {
            "prepare_ms": 1000 * (time.perf_counter() - start_s),
            "first_plan": plan_summary(plan),
        }

    def _make_peer(self) -> Peer:
        work, way = self._work, self._way
        setting = Setting(work.model, work.optimizer, work.task.loss, work.blocks, way.seed)
        return make_peer(way.peer, setting, way.amount)

    def _step(self) -> dict[str, Any]:
        batch = self._work.batch(self._index)
        start_s = time.perf_counter()
        try:
            found = self._trained(batch)
        except (BudgetError, PlatformError) as error:
            return {"raised": str(error)}
        found = {"step_ms": 1000 * (time.perf_counter() - start_s), **found}
        if self._index == 0 and self._way.gradient_file is not None:
            write_gradient(self._work.model, Path(self._way.gradient_file))
        self._index += 1
        return found

    def _trained(self, batch: Any) -> dict[str, Any]:
        if self._way.door is not None:
            return self._through_door(batch)
        if self._session is not None:
            report = self._session.step(batch, self._work.task.loss)
            if self._index == 0:  # later plans are made by what this step held
                self._predicted_bytes = self._session.predicted_peak_bytes
            return {**_reported(report), "is_settled": self._session.is_settled}
        self._peer = self._peer or self._make_peer()
        process_memory.reset_peak()  # a session does so itself, and remembers
        return {"loss": self._peer.step(batch), "peak_bytes": process_memory.peak_bytes()}

    def _through_door(self, batch: Any) -> dict[str, Any]:
        if self._door is None:
            way, work = self._way, self._work
            assert way.door is not None
            options = session_options(way.policy, way.tolerance) | {
                "budget": way.budget_bytes,
                "seed": way.seed,
                "baseline_bytes": self.floor_bytes,
            }
            self._door = DoorLoop(way.door, work.model, work.optimizer, work.task.loss, options)
        return {"loss": self._door.step(batch), "peak_bytes": process_memory.peak_bytes()}

    def _settled_gradient(self, path: Path) -> dict[str, Any]:
        if self._first is None:
            raise ValueError("asked for a settled gradient without keeps_first_state")
        model, batch = self._work.model, self._work.batch(0)
        self._first.restore(model)
        if self._peer is None or not self._peer.saves_by_autograd:
            self._trained(batch)
            write_gradient(model, path)
            return {}
        counted = SavedBytes(model, batch)
        self._peer.counts_in(counted)
        with counted.hooks():
            self._trained(batch)
        write_gradient(model, path)
        return {"saved_bytes_peak": counted.peak_bytes}

    def _facts(self) -> dict[str, Any]:
        session, examples = self._session, self._examples
        if self._door is not None:
            return {"examples": examples, "session_peak_bytes": self._door.peak_bytes}
        if session is None:
            saved = self._peer.saved_peak_bytes() if self._peer else None
            return {"examples": examples, "saved_bytes_peak": saved}
        return {
            "examples": examples,
            "predicted_peak_bytes": self._predicted_bytes or None,
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
        "peak_bytes": report.charged_peak_bytes,
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
