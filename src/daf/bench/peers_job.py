"""``daf bench peers``: every alternative a user has, beside DAF, on one workload.

Each contestant is a process of its own with its own high-water mark. Plain
PyTorch's stays alive; each of the others is stepped in turn with it, so that a
noisy machine falls on both, and ends before the next one starts, so that no
more than two models are in memory.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from daf.bench.child import ContestantError
from daf.bench.contestant import Contestant, Entry, RefusedError, contestants
from daf.bench.result import BenchResult, median_ratio
from daf.errors import UnknownNameError

WARM_UP_STEPS = 2
PLAIN = "plain"
# The workloads of the design's section 9 that this benchmark knows: model, batch size, data.
WORKLOADS: Mapping[str, tuple[str, int, str]] = MappingProxyType(
    {"W1": ("resnet18", 128, "cifar10")}
)


@dataclass(frozen=True, slots=True)
class PeersJob:
    """What is run. ``budgets`` are shares of plain's peak above the floor."""

    workload: str
    model: str
    data: str
    batch_size: int
    steps: int = 20
    seed: int = 0
    memory_format: str = "channels_last"
    bits: tuple[int, ...] = (1, 2, 4)
    budgets: tuple[float, ...] = (0.5, 0.33, 0.25)
    peers: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: ALL_PEERS)


ALL_PEERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain again": {},
        "plain, same allocator": {"return_freed_blocks": True},
        "checkpointing": {"peer": "checkpoint"},
        "accumulation, 4 pieces": {"peer": "accumulate", "amount": 4},
        "torch.compile": {"peer": "compile"},
        "activation budget 0.5": {"peer": "activation-budget", "amount": 0.5},
        "activation budget 0.2": {"peer": "activation-budget", "amount": 0.2},
        "disk": {"peer": "disk"},
        "min-max codes, 2 bits": {"peer": "minmax", "amount": 2},
        "min-max codes, 4 bits": {"peer": "minmax", "amount": 4},
    }
)


def full_job(workload: str, data: str) -> PeersJob:
    """The whole comparison.

    Raises:
        UnknownNameError: no workload has that name.
    """
    if workload not in WORKLOADS:
        raise UnknownNameError(f"unknown workload {workload!r}; known: {', '.join(WORKLOADS)}")
    model, batch_size, _ = WORKLOADS[workload]
    return PeersJob(workload, model, data, batch_size)


def quick_job(workload: str, data: str) -> PeersJob:
    """The same contestants with few steps: enough for peaks, too few for losses."""
    job = full_job(workload, data)
    return PeersJob(workload, job.model, data, job.batch_size, steps=4, bits=(2,))


def run(job: PeersJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run every contestant beside plain PyTorch; rows in the order of the table."""
    plain_entry = Entry(
        *(PLAIN, job.model, job.data, job.batch_size, job.seed), memory_format=job.memory_format
    )
    with tempfile.TemporaryDirectory() as folder, contestants([plain_entry]) as (plain,):
        bench = _Bench(job, plain, Path(folder), on_progress)
        rows = bench.rows()
    return BenchResult("peers", rows, figures_of(rows, job), _notes(job))


def _notes(job: PeersJob) -> tuple[str, ...]:
    kind, _, place = job.data.partition(":")
    data = f"{kind}:{Path(place).name}" if place else kind
    return (
        f"{job.workload}: {job.model}, {data}, batch {job.batch_size}, {job.steps} steps",
        "step ratios are medians over interleaved pairs with plain; the first "
        f"{WARM_UP_STEPS} steps (compiling, measuring) are not timed",
        "peaks are whole-process high-water marks less plain's floor; steady ones leave the "
        "first steps out",
        "accumulation changes batch statistics, and so the mathematics, where a model has them",
    )


class _Bench:
    def __init__(
        self, job: PeersJob, plain: Contestant, folder: Path, on_progress: Callable[[str], None]
    ) -> None:
        self._job = job
        self._plain = plain
        self._folder = folder
        self._say = on_progress
        self._floor_bytes = self._plain_peak_bytes = 0

    def rows(self) -> list[dict[str, Any]]:
        self._say("plain, alone")
        for _ in range(WARM_UP_STEPS + self._job.steps):
            self._plain.step()
        alone = list(self._plain.steps)
        facts = self._plain.facts()
        self._floor_bytes = facts["floor_bytes"]
        self._plain_peak_bytes = facts["peak_bytes"]
        rows = [self._beside(self._entry(name, change)) for name, change in self._changes().items()]
        gradient_of_plain = self._gradient(self._plain)
        for row in rows:
            row["gradient_error"] = _relative_error(row.pop("gradient", None), gradient_of_plain)
        own = self._row_of(self._plain.entry, alone, facts) | {"step_ratio": 1.0}
        own |= {"gradient_error": 0.0, "saved_bytes_peak": _plain_saved(rows)}
        return [own, *rows]

    def _changes(self) -> dict[str, Mapping[str, Any]]:
        widths = {f"DAF, {bits} bits": {"bits": bits} for bits in self._job.bits}
        above = self._plain_peak_bytes - self._floor_bytes
        budgets = {
            f"DAF, budget {100 * share:.0f} %": {
                "budget_bytes": int(self._floor_bytes + share * above)
            }
            for share in self._job.budgets
        }
        return {**self._job.peers, **widths, **budgets}

    def _entry(self, label: str, changes: Mapping[str, Any]) -> Entry:
        job = self._job
        named = {"memory_format": job.memory_format, **changes}
        return Entry(label, job.model, job.data, job.batch_size, job.seed, **named)

    def _beside(self, entry: Entry) -> dict[str, Any]:
        """One contestant in turn with plain; what it cannot do is told in its row."""
        self._say(entry.label)
        try:
            with contestants([entry]) as (one,):
                theirs = self._interleave(one)
                row = self._row_of(entry, one.steps, one.facts())
                row["step_ratio"] = median_ratio([step.step_ms for step in _timed(one)], theirs)
                row["gradient"] = self._gradient(one)
        except RefusedError as error:
            return {"contestant": entry.label, "refused": str(error)}
        except ContestantError as error:
            return {"contestant": entry.label, "failed": str(error)}
        return row

    def _interleave(self, one: Contestant) -> list[float]:
        """Step the contestant and plain in turn; plain's milliseconds beside each timed step."""
        for _ in range(WARM_UP_STEPS):
            one.step()
        theirs = []
        for index in range(self._job.steps):
            pair = (one, self._plain) if index % 2 else (self._plain, one)
            for each in pair:
                each.step()
            theirs.append(self._plain.steps[-1].step_ms)
        return theirs

    def _row_of(self, entry: Entry, steps: list[Any], facts: dict[str, Any]) -> dict[str, Any]:
        timed = steps[WARM_UP_STEPS:]
        step_ms = statistics.median(step.step_ms for step in timed)
        above = self._plain_peak_bytes - self._floor_bytes
        steady = max(step.peak_bytes for step in timed)
        return {
            "workload": self._job.workload,
            "contestant": entry.label,
            "is_daf": entry.bits is not None or entry.budget_bytes is not None,
            "budget_bytes": entry.budget_bytes,
            "floor_bytes": self._floor_bytes,
            "peak_bytes": facts["peak_bytes"],
            "peak_ratio": (facts["peak_bytes"] - self._floor_bytes) / above,
            "steady_peak_ratio": (steady - self._floor_bytes) / above,
            "predicted_peak_bytes": facts["predicted_peak_bytes"] or None,
            "saved_bytes_plain": facts["saved_bytes_plain"],
            "saved_bytes_peak": facts["saved_bytes_peak"],
            "step_ms": step_ms,
            "examples_per_s": 1000 * self._job.batch_size / step_ms,
            "loss": statistics.fmean(step.loss for step in timed[-max(1, len(timed) // 2) :]),
        }

    def _gradient(self, contestant: Contestant) -> Path:
        path = self._folder / f"{contestant.entry.label.replace(' ', '-')}.gradient"
        contestant.write_gradient(path)
        return path


def _timed(contestant: Contestant) -> list[Any]:
    return contestant.steps[WARM_UP_STEPS:]


def _plain_saved(rows: list[dict[str, Any]]) -> int | None:
    """What autograd holds for plain, as a contestant that looks at saved tensors saw it."""
    return next((row["saved_bytes_plain"] for row in rows if row.get("saved_bytes_plain")), None)


def _relative_error(gradient: Path | None, reference: Path) -> float | None:
    """‖g − g₀‖ ÷ ‖g₀‖ over all parameters, read piece by piece."""
    if gradient is None:
        return None
    ours = np.memmap(gradient, np.float32, "r")
    theirs = np.memmap(reference, np.float32, "r")
    difference = sum(
        float(np.square(ours[at : at + 2**20] - theirs[at : at + 2**20], dtype=np.float64).sum())
        for at in range(0, len(theirs), 2**20)
    )
    whole = sum(
        float(np.square(theirs[at : at + 2**20], dtype=np.float64).sum())
        for at in range(0, len(theirs), 2**20)
    )
    return float((difference / whole) ** 0.5) if whole else None


def figures_of(rows: list[dict[str, Any]], job: PeersJob) -> dict[str, float]:
    """DAF under its largest budget beside the peer that is fastest within it, or else smallest.

    ``speed_vs_minmax_baseline`` is how many times as fast as the published code DAF's is at the
    same width, whole steps compared.
    """
    ran = {row["contestant"]: row for row in rows if "step_ratio" in row}
    figures: dict[str, float] = {}
    share = max(job.budgets, default=0.0)
    ours = ran.get(f"DAF, budget {100 * share:.0f} %")
    peers = [row for row in ran.values() if not row["is_daf"]]
    if ours:
        within = [row for row in peers if row["peak_ratio"] <= share]
        best = min(within, key=_time) if within else min(peers, key=lambda row: row["peak_ratio"])
        figures |= {
            "daf_peak_ratio": ours["peak_ratio"],
            "daf_step_ratio": ours["step_ratio"],
            "best_peer_peak_ratio": best["peak_ratio"],
            "best_peer_step_ratio": best["step_ratio"],
        }
    for bits in job.bits:
        minmax, coded = ran.get(f"min-max codes, {bits} bits"), ran.get(f"DAF, {bits} bits")
        if minmax and coded and "speed_vs_minmax_baseline" not in figures:
            ratio = minmax["step_ratio"] / coded["step_ratio"]
            figures["speed_vs_minmax_baseline"] = ratio
    return figures


def _time(row: dict[str, Any]) -> float:
    return float(row["step_ratio"])
