"""``daf bench start``: what a session costs before it trains, in fresh processes.

Of each workload and budget: plain PyTorch's steps and peak, a session's first run, and a second
one. Both sides take the same batches. Time counts from the session's making, data and model being
there. A budget that is refused is followed by the least that the refusal named, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from daf_bench.doors.fixed_cost import fixed_costs
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.harness.subprocess_channel import Child, ContestantError
from daf_bench.start.child import RUN_STEPS, STEADY_STEPS, TWO_LAYERS, Start
from daf_bench.workloads import WORKLOADS
from daf_bench.workloads.sources import Sources, default_sources

COLD_MS, WARM_MS = 300.0, 50.0  # what any session may take, however small the model
FIXED_STEPS = 400
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class StartJob:
    """``shares`` of plain's peak are the budgets; ``steps`` of each kind are timed."""

    workloads: tuple[str, ...] = (TWO_LAYERS, *WORKLOADS)
    shares: tuple[float, ...] = (0.5, 0.75)
    steps: int = STEADY_STEPS
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> StartJob:
    """Two layers and the smallest workload at one budget: a minute; times say little."""
    return StartJob((TWO_LAYERS, "w6"), (0.75,), steps=3, is_small=True)


def run(
    job: StartJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    described = {**asdict(replace(job, sources=Sources())), "sources": job.sources.described()}
    del described["workloads"]  # later runs may ask for more
    log = RowLog(rows_file, described)
    points = [(name, share) for name in job.workloads for share in job.shares]
    for place, (name, share) in enumerate(points):
        what = f"{name} at {share:.0%}"
        on_progress(what, place, len(points))
        log.row(what, lambda: _row(job, name, share))  # noqa: B023
    fixed = log.row("fixed", lambda: {"fixed_ms": fixed_costs(FIXED_STEPS)["step"]})
    rows = [each for each in log.rows if "workload" in each]
    notes = (
        f"on {torch.get_num_threads()} threads; data: {job.sources.described()}",
        f"cold: (from the session's making to the end of the first step - {COLD_MS:.0f} ms) over "
        "plain's step",
        f"warm: (the same in a second process - {WARM_MS:.0f} ms) over the session's steady step; "
        "warm_to_plains_first: over plain's first step, which loads code and memory, too",
        f"run20: (a session's first {RUN_STEPS} steps - {COLD_MS:.0f} ms) over as many steady ones "
        "and two of plain's",
    )
    return BenchResult("start", rows, figures_of(rows) | fixed, notes)


def _row(job: StartJob, name: str, share: float) -> Row:
    row: Row = {"workload": name, "share": share, "refused": False}
    with TemporaryDirectory() as cache:
        try:
            plain = _trained(job, name, None)
            budget_bytes = int(share * plain["peak_bytes"])
            cold = _trained(job, name, budget_bytes, cache)
            if "least_bytes" in cold:
                row["refused"], budget_bytes = True, cold["least_bytes"]
                cold = _trained(job, name, budget_bytes, cache)
            warm = _trained(job, name, budget_bytes, cache)
        except ContestantError as error:
            return row | {"failed": str(error)}
    row |= {"plain_ms": plain["plain_ms"], "plain_first_ms": plain["first_ms"]}
    row |= {"plain_peak_bytes": plain["peak_bytes"]}
    return row | {"budget_bytes": budget_bytes, "cold": cold, "warm": warm}


def _trained(job: StartJob, name: str, budget_bytes: int | None, cache: str = "") -> dict[str, Any]:
    folder = None if job.sources.folder is None else str(job.sources.folder)
    start = Start(name, folder, job.is_small, budget_bytes, cache)
    child = Child("daf_bench.start.child", asdict(start), f"{name} within {budget_bytes}")
    try:
        return child.ask("train", job.steps)
    finally:
        child.end()


def _is_timed(row: Row) -> bool:
    return "cold" in row and "first_ms" in row["cold"] and "first_ms" in row["warm"]


def ratios_of(row: Row) -> dict[str, float]:
    """What of a row the figures are made of."""
    cold, warm, plain_ms = row["cold"], row["warm"], row["plain_ms"]
    short_ms = RUN_STEPS * cold["steady_ms"] + 2 * plain_ms
    return {
        "cold": (cold["first_ms"] - COLD_MS) / plain_ms,
        "warm": (warm["first_ms"] - WARM_MS) / warm["steady_ms"],
        "warm_to_plains_first": (warm["first_ms"] - WARM_MS) / row["plain_first_ms"],
        "run20": (cold["run_ms"] - COLD_MS) / short_ms,
        "measuring_share": max(cold["measuring_share"], warm["measuring_share"]),
    }


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """The figures, of rows that trained; how many did not, or passed their budget."""
    timed = [each for each in rows if _is_timed(each)]
    ratios = [ratios_of(each) for each in timed]
    figures: dict[str, float] = {}
    for name in ratios[0] if ratios else ():
        found = [each[name] for each in ratios]
        figures |= {f"{name}_worst": max(found), f"{name}_median": median(found)}
    passed = sum(
        each[way]["peak_bytes"] > each["budget_bytes"] for each in timed for way in ("cold", "warm")
    )
    return figures | {
        "rows": len(rows),
        "timed": len(timed),
        "refused": sum(each["refused"] for each in rows),
        "failed": len(rows) - len(timed),
        "over_budget": passed,
    }
