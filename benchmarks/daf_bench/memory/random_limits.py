"""Random limits: every one either trains within it or raises, and nothing is left broken.

Each workload runs in a process of its own; a kill would show as its exit code.
``python -m daf_bench.memory.random_limits JSON`` is that process.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from daf.memory import process_memory
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import audit, reset_peaks, stats
from daf_bench.harness.subprocess_channel import ContestantError
from daf_bench.harness.worker import Entry
from daf_bench.harness.workload import Workload

# Interpreter, libraries and glibc's heap may move by this much beside the account.
OTHER_MAY_GROW_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class LimitJob:
    """``count`` random limits on one workload."""

    model: str
    data: str
    batch_size: int
    count: int
    seed: int = 0


def run_limits(
    job: LimitJob, on_progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run them in a process of their own.

    Raises:
        ContestantError: that process was killed or failed: the one thing a limit must prevent.
    """
    on_progress(f"{job.count} random limits on {job.model}")
    command = [sys.executable, "-m", "daf_bench.memory.random_limits", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ContestantError(
            f"{job.model} under random limits ended with code {done.returncode}; "
            f"its last words: {done.stderr.strip()[-500:]}"
        )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


class Limits:
    """A workload that is warmed up without a limit and then stepped under random ones."""

    def __init__(self, job: LimitJob) -> None:
        self._job = job
        entry = Entry("limits", job.model, job.data, job.batch_size, job.seed, learning_rate=1e-3)
        self._work = Workload(entry)
        self._parameters = list(self._work.model.parameters())
        self._random = np.random.default_rng(job.seed)

    def rows(self) -> list[dict[str, Any]]:
        """One row per limit, drawn between what is live between steps and 1.2 × the step's peak."""
        with RecyclingAllocator() as allocator:
            self._work.step()
            self._work.step()
            self._free_gradients()
            least = stats()["held_bytes.current"] - stats()["recycled_bytes.current"]
            reset_peaks()
            self._work.step()
            most = stats()["held_bytes.peak"]
            return [
                self._row(allocator, int(least + share * (1.2 * most - least)))
                for share in self._random.random(self._job.count)
            ]

    def _row(self, allocator: RecyclingAllocator, limit_bytes: int) -> dict[str, Any]:
        # numpy's memory is outside the account.
        before = [parameter.detach().numpy().copy() for parameter in self._parameters]
        self._free_gradients()
        allocator.trim()
        allocator.limit_bytes = limit_bytes
        other = audit().other_bytes
        reset_peaks()
        process_memory.reset_peak()
        outcome = self._attempt()
        held_peak, peak = stats()["held_bytes.peak"], process_memory.peak_bytes()
        allocator.limit_bytes = None
        changed = [
            not np.array_equal(old, parameter.detach().numpy())
            for old, parameter in zip(before, self._parameters, strict=True)
        ]
        goes_on = np.isfinite(self._work.step()["loss"])
        within = held_peak <= limit_bytes and peak <= other + limit_bytes + OTHER_MAY_GROW_BYTES
        whole = any(changed) if outcome == "trained" else not any(changed)
        return {
            "part": "limit",
            "workload": self._job.model,
            "limit_bytes": limit_bytes,
            "outcome": outcome,
            "held_peak_bytes": held_peak,
            "peak_bytes": peak,
            "sound": bool(within and whole and goes_on),
        }

    def _attempt(self) -> str:
        try:
            self._work.step()
        except RuntimeError:
            outcome = "raised"
        else:
            outcome = "trained"
        self._free_gradients()
        return outcome

    def _free_gradients(self) -> None:
        self._work.optimizer.zero_grad(set_to_none=True)
        gc.collect()


if __name__ == "__main__":
    print(json.dumps(Limits(LimitJob(**json.loads(sys.argv[1]))).rows()))
