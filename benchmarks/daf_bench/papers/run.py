"""``daf bench papers``: the table of both papers, and DAF as published beside DAF's own plan.

On each workload plain PyTorch gives floor and peak. Then ``policy="daf"`` and DAF's own plan get
one budget between the two, each in a process of its own, and all three are stepped in turn.
SAGE's strategies are those of ``daf bench sweep --policies``, with the rows that lie beside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from daf_bench.harness.method_runner import Way
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.kernels import reductions
from daf_bench.kernels.reductions import ReduceJob
from daf_bench.kernels.reductions import quick_job as quick_reduce
from daf_bench.papers import equal_noise, eviction
from daf_bench.papers.figures import REDUCE, STRATEGIES, TABLE, TRAINING, figures_of
from daf_bench.papers.in_turn import measured_in_turn
from daf_bench.papers.table import ROWS
from daf_bench.sweep import run as sweep
from daf_bench.sweep import strategies
from daf_bench.workloads import WORKLOADS
from daf_bench.workloads.sources import Sources, default_sources

Report = Callable[[str, int, int], None]
PERCENTS = (50, 25)  # of plain's peak above the floor, for SAGE's strategies


@dataclass(frozen=True, slots=True)
class PapersJob:
    """What is run; ``percent`` is of plain's peak above the floor, ``steps`` are those timed."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    percent: int = 50
    steps: int = 6
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> PapersJob:
    """Return the smallest workload and few steps, whose times say little."""
    return PapersJob(workloads=("w6",), steps=3)


def run(
    job: PapersJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    log = RowLog(rows_file, _measured(job))
    training: list[Row] = []
    for place, name in enumerate(job.workloads):

        def say(what: str, name: str = name, place: int = place) -> None:
            on_progress(f"{name}: {what}", place, len(job.workloads))

        found = log.row(name, lambda: _of_workload(job, name, say))  # noqa: B023
        training += found["contestants"]
    noise = [
        log.row(f"{name}, equal noise", partial(_at_equal_noise, job, name))
        for name in job.workloads
    ]
    evicted = [
        log.row(f"{name}, eviction", partial(_with_evictions, job, name))
        for name in eviction.WORKLOADS
        if name in job.workloads
    ]
    reduced = log.row("reduce", partial(_reduced, job))
    beside = rows_file and rows_file.with_name("policies.jsonl")
    compared = _strategies(job, beside, on_progress)
    table = [{"part": TABLE, **asdict(row)} for row in ROWS]
    rows = [*table, *training, *noise, *evicted, reduced, *compared]
    return BenchResult("papers", rows, figures_of(rows), _notes(job, training))


def _of_workload(job: PapersJob, name: str, say: Callable[[str], None]) -> Row:
    folder = job.sources.folder
    load = os.getloadavg()[0]
    way = Way(name, str(folder) if folder else None, job.is_small)
    found = measured_in_turn(way, job.percent, job.steps, say)
    named = {"part": TRAINING, "workload": name, "load_average": load}
    return {"contestants": [{**named, **row} for row in found]}


def _at_equal_noise(job: PapersJob, name: str) -> Row:
    return equal_noise.measured(name, job.sources.folder, is_small=job.is_small)


def _with_evictions(job: PapersJob, name: str) -> Row:
    return eviction.measured(name, job.sources.folder, is_small=job.is_small)


def _reduced(job: PapersJob) -> Row:
    """The figures of ``daf bench reduce``; fewer, smaller tensors in a run of few steps."""
    is_quick = job.steps < PapersJob().steps
    return {"part": REDUCE, **reductions.run(quick_reduce() if is_quick else ReduceJob()).figures}


def _strategies(job: PapersJob, rows_file: Path | None, on_progress: Report) -> list[Row]:
    """The figures of ``daf bench sweep --policies``, of SAGE's models among the workloads."""
    models = tuple(name for name in strategies.MODELS if name in job.workloads)
    if not models:
        return []
    asked = replace(
        sweep.strategies_job(),
        workloads=models,
        timed=models,
        percents=PERCENTS,
        steps=job.steps,
        is_small=job.is_small,
        sources=job.sources,
    )
    return [{"part": STRATEGIES, **sweep.run(asked, rows_file, on_progress).figures}]


def _measured(job: PapersJob) -> dict[str, Any]:
    """Return what a row depends on beside its workload, so that later runs may ask for more."""
    return {
        "percent": job.percent,
        "steps": job.steps,
        "is_small": job.is_small,
        "sources": job.sources.described(),
    }


def _notes(job: PapersJob, training: list[Row]) -> tuple[str, ...]:
    sizes = "small sizes" if job.is_small else "full sizes"
    load = max((row["load_average"] for row in training), default=0.0)
    left = [name for name in WORKLOADS if name not in job.workloads]
    return (
        f"{', '.join(job.workloads)}; {sizes}; {job.steps} timed steps in turn at {job.percent} % "
        f"of plain's peak above the floor; data: {job.sources.described()}",
        f"not measured: {', '.join(left) or 'none of the workloads'}",
        "ours_vs_daf_published_saved: bytes held for backward by the published codes over ours at "
        "equal noise of the gradient, medians over widths, then workloads; no plan, whole batches",
        f"eviction_*: what losing planes adds to the gradient's error where the pool holds "
        f"{eviction.COMPARED:.0%} of codes of {eviction.BITS} bits, over that by measured "
        "importance; the workload with the least",
        "ours_vs_daf_published_step and _saved_at_budget: medians over the workloads on which both "
        "trained, at the same budget; not at equal gradient noise, which gradient_error shows",
        "saved_at_budget: bytes held for backward, as published ÷ ours, most of the timed steps; "
        "our plan may cut the batch, and uses what the budget allows",
        "gradient_error: relative, of the first batch at the first weights by the plan of the end; "
        "a batch that is cut draws other dropout, which counts as error",
        *strategies.NOTES,
        f"load average of the machine when a workload began: at most {load:.1f} on "
        f"{os.cpu_count()} cores; steps were taken in turn, so that other work falls on all alike",
    )
