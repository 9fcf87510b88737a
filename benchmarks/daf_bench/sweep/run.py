"""``daf bench sweep``: every workload at several budgets, in a process for each point.

Plain gives floor and peak; a budget of p % is the floor and p % of plain's peak above it. At each
budget a session writes down its prediction, trains a few steps, and its peak is measured. What is
refused is tried at the least budget that the refusal names, and with 10 % less above the floor.
On the timed workloads plain trains in turn with every contestant, and the strategies that a user
would write by hand are measured beside DAF's. ``--policies`` is SAGE's comparison
(``strategies``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daf_bench.harness.method_runner import Contender, Way
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.sweep import strategies
from daf_bench.sweep.figures import BATCH_STATISTICS, OWN_POLICY, figures_of
from daf_bench.sweep.point import By, measure_plain, measure_point, median_ms
from daf_bench.workloads import WORKLOADS
from daf_bench.workloads.sources import Sources, default_sources

# The least budget must work and this share of it above the floor must not.
TEN_PERCENT_LESS = 0.9
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SweepJob:
    """What is run; the defaults are the full benchmark without the other policies.

    ``policies`` are compared on the timed workloads; None is the session's own choice, and
    the only one on the others. ``by_hand`` are pairs of the share of blocks that are computed
    again and the number of pieces; of these one is used.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    timed: tuple[str, ...] = ("w1", "w3")
    percents: tuple[int, ...] = (100, 75, 50, 35, 25)
    steps: int = 6
    policies: tuple[str | None, ...] = (None,)
    tolerance: float | None = None
    by_hand: tuple[tuple[float, int], ...] = ((1.0, 1), (0.5, 1), (0.0, 2), (0.0, 4), (0.0, 8))
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> SweepJob:
    """Two workloads, two budgets, few steps: a few minutes, and too few steps to mean much."""
    return SweepJob(
        workloads=("w1", "w3"), percents=(100, 50), steps=3, by_hand=((1.0, 1), (0.0, 2))
    )


def strategies_job() -> SweepJob:
    """SAGE's eight strategies on its four models: some hours."""
    return SweepJob(
        workloads=strategies.MODELS,
        timed=strategies.MODELS,
        percents=strategies.PERCENTS,
        policies=strategies.POLICIES,
        by_hand=strategies.BY_HAND,
    )


def run(
    job: SweepJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends; minutes in quick form, most of an hour in full."""
    log = RowLog(rows_file, measured_by(job))
    expected = sum(_expected_rows(job, name) for name in job.workloads)
    for name in job.workloads:

        def report(what: str, name: str = name) -> None:
            on_progress(f"{name}: {what}", len(log.rows), max(expected, len(log.rows)))

        _WorkloadSweep(job, name, log, report).carry_out()
    figures = figures_of(log.rows) | strategies.figures_of(log.rows)
    return BenchResult("sweep", log.rows, figures, _notes(job))


def measured_by(job: SweepJob) -> dict[str, Any]:
    """What rows depend on: not which others there are, and of the sources their content."""
    return {
        "steps": job.steps,
        "tolerance": job.tolerance,
        "is_small": job.is_small,
        "sources": job.sources.described(),
    }


def _expected_rows(job: SweepJob, name: str) -> int:
    if name not in job.timed:
        return 1 + len(job.percents)
    return 1 + len(job.by_hand) + len(job.percents) * len(job.policies)


def _notes(job: SweepJob) -> tuple[str, ...]:
    sizes = "small sizes" if job.is_small else "full sizes"
    return (
        f"{', '.join(job.workloads)}; {sizes}; {job.steps} steps a point; "
        f"data: {job.sources.described()}",
        "budget of p %: floor + p % of (plain's peak - floor); peaks are VmHWM, profiling included",
        "prediction error: |predicted - measured| / (measured peak of the steps - floor), the "
        "prediction as it stood before the first full-size step",
        "step ratios: the median over pairs of steps in turn with plain, the first two left out",
        "slower_than_static counts, of strategies by hand with no higher peak that compute "
        "the same; accumulation changes what batch normalisation computes, so it is shown only",
        *strategies.NOTES,
    )


class _WorkloadSweep:
    """One workload: its plain contestant stays alive while any point needs it."""

    def __init__(
        self, job: SweepJob, name: str, log: RowLog, on_progress: Callable[[str], None]
    ) -> None:
        self._job, self._name, self._log = job, name, log
        self._on_progress = on_progress
        self._is_timed = name in job.timed
        folder = job.sources.folder
        self._way = Way(name, str(folder) if folder else None, job.is_small)
        self._plain: Contender | None = None
        self._plain_row: Row = {}

    def carry_out(self) -> None:
        """Measure what the log does not hold yet."""
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            self._stack, self._folder = stack, Path(folder)
            self._plain_row = self._row("plain", self._measure_plain)
            if self._is_timed:
                for share, pieces in self._job.by_hand:
                    self._by_hand(share, pieces)
            for policy in self._job.policies if self._is_timed else (None,):
                self._budgets(policy)

    def _row(self, name: str, make: Callable[[], Row]) -> Row:
        self._on_progress(name)
        named = {"workload": self._name, "point": name}
        key = f"{self._name}: {name}" + (", in turn" if self._is_timed else "")
        return self._log.row(key, lambda: {**named, **make()})

    def _measure_plain(self) -> Row:
        return {"part": "plain", **measure_plain(self._running_plain(), self._job.steps)}

    def _running_plain(self) -> Contender:
        """Started when first wanted, and warm: it has written its first step's gradient."""
        if self._plain is None:
            gradient = str(self._folder / "plain")
            self._plain = Contender(replace(self._way, gradient_file=gradient))
            self._stack.callback(self._plain.end)
            self._plain.step()
        return self._plain

    def _by_hand(self, share: float, pieces: int) -> None:
        name = f"checkpoint {100 * share:.0f} % of blocks" if share else f"accumulate {pieces}"
        peer, amount = ("checkpoint", share) if share else ("accumulate", float(pieces))
        way = replace(self._way, peer=peer, amount=amount)
        self._row(
            f"by hand: {name}",
            lambda: {"part": "static", "strategy": name, **self._measure(way, is_timed=True)},
        )

    def _budgets(self, policy: str | None) -> None:
        for percent in self._job.percents:
            row = self._budget(policy, f"{percent} %", self._budget_of(percent), percent)
            is_ours = policy in (None, OWN_POLICY)
            if is_ours and row["outcome"] == "refused" and row["least_bytes"] is not None:
                self._least(policy, row)

    def _least(self, policy: str | None, refused: Row) -> None:
        """The least budget that was named, and 10 % less of what it has above the floor."""
        least = int(refused["least_bytes"])
        less = refused["floor_bytes"] + int(TEN_PERCENT_LESS * (least - refused["floor_bytes"]))
        self._budget(policy, "least", least, None)
        self._budget(policy, "10 % less", less, None)

    def _budget_of(self, percent: int) -> int:
        floor, peak = self._plain_row["floor_bytes"], self._plain_row["peak_bytes"]
        return int(floor + percent * (peak - floor) / 100)

    def _budget(self, policy: str | None, name: str, budget: int, percent: int | None) -> Row:
        cuts = self._name in BATCH_STATISTICS and policy in strategies.CUT_STATISTICS
        way = replace(
            self._way,
            budget_bytes=budget,
            policy=policy,
            tolerance=self._job.tolerance,
            cuts_statistics=cuts,
        )
        label = policy or OWN_POLICY
        asked = {"policy": label, "percent": percent, "asked": name, "budget_bytes": budget}
        asked |= {"cuts_statistics": cuts}
        return self._row(
            f"{label}, {name}",
            lambda: {"part": "budget", **asked, **self._measure(way, is_timed=self._is_timed)},
        )

    def _measure(self, way: Way, *, is_timed: bool) -> Row:
        plain = self._running_plain()
        gradient = self._folder / "ours"
        gradient.unlink(missing_ok=True)
        by = By(plain if is_timed else None, self._folder / "plain", gradient)
        row = measure_point(replace(way, gradient_file=str(gradient)), self._job.steps, by)
        if "step_ms" in row and not is_timed:
            row["step_ratio_apart"] = row["step_ms"] / median_ms(self._plain_row["steps_ms"])
        return row
