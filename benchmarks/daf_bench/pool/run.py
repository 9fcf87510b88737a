"""``daf bench pool``: what the paged pool costs, what it wastes, and how fast it gives way.

(a) time of one insert, eviction and release against the number of live pages;
(b) thousands of training-like iterations on the pool, on glibc's malloc, on a
best-fit arena and on the paper's fixed growth; (c) growth by 100 MB against
growth by need, under a cap; (d) a cap halved in the middle of a step, and the
gradient that comes of it; (e) a real training loop whose widths move, on all of
these and on several sizes of page.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import daf_bench._native as _native
from daf.core.code_tables import rotated_error
from daf.pool.page_size import choose_page_bytes
from daf.pool.paged_pool import PagedStore, PlaneTensor
from daf_bench.harness.result import BenchResult
from daf_bench.pool import training
from daf_bench.pool.eviction_error import gradient_row
from daf_bench.pool.plane_addresses import Pages
from daf_bench.pool.traces import (
    CONTESTANTS,
    GROWTH_RULES,
    Shape,
    growth_row,
    make_operations,
    play,
    usual_cap,
    waste_of,
)
from daf_bench.workloads.sources import Sources, default_sources

Progress = Callable[[str], None]
Row = dict[str, Any]

_TIMED_PAGES = (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_RUNS_PER_PLANE = (1, 8)  # of the two planes of every timed tensor
_PADDING_AND_TABLES = 0.005  # of the payload; the rest of 3 % is for free pages and records


@dataclass(frozen=True, slots=True)
class PoolJob:
    """What is run. The defaults are the full benchmark: about ten minutes on two cores."""

    rounds: int = 41
    stress_iterations: int = 10_000
    growth_iterations: int = 100
    halvings: int = 7
    halved_bytes: int = 256_000_000
    gradient_seeds: int = 16
    training_steps: int = 3000
    is_small: bool = False  # the training loop's batch
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> PoolJob:
    """The same in under a minute."""
    few = PoolJob(11, stress_iterations=200, growth_iterations=8, halvings=3, gradient_seeds=4)
    return replace(few, training_steps=40)


def run(job: PoolJob, on_progress: Progress = lambda _: None) -> BenchResult:
    """Run all five parts."""
    times = time_rows(job, on_progress)
    stress = stress_rows(job, on_progress)
    growth = growth_rows(job, on_progress)
    halved = halving_rows(job, on_progress)
    on_progress("the gradient of a step whose cap is halved")
    gradient = gradient_row(job.gradient_seeds)
    trained = training.rows_of(job.training_steps, job.sources, on_progress, is_small=job.is_small)
    largest = [row for row in times if row["live"] == max(_TIMED_PAGES)]
    ours, fixed, _ = growth
    figures = {
        "op_us_at_1e6": max(row["us_per_page"] for row in largest if row["what"] != "tree"),
        "tree_us_at_1e6": max(row["us"] for row in largest if row["what"] == "tree"),
        "effective_over_theoretical_worst": stress[0]["worst"],
        "effective_over_theoretical_worst_at_peaks": stress[0]["worst_at_peaks"],
        "effective_over_theoretical_drift": stress[0]["last_tenth"] - stress[0]["first_tenth"],
        "evictions_vs_fixed_increment": ours["evicted_pages"] / max(1, fixed["evicted_pages"]),
        "cap_halved_ms": max(row["ms"] for row in halved),
        "halved_gradient_error_vs_predicted": gradient["measured_over_predicted"],
        **_of_training(trained),
    }
    rows = [*times, *stress, *growth, *halved, gradient, *trained]
    return BenchResult("pool", rows, figures, _NOTES)


def _of_training(rows: list[Row]) -> dict[str, float]:
    own = rows[0]
    evicted = {row["rule"]: row["evicted_pages"] for row in rows if row["what"] == "growth"}
    return {
        "training_effective_over_theoretical_worst": own["worst_at_peaks"],
        "training_effective_over_theoretical_drift": own["last_tenth"] - own["first_tenth"],
        "training_evictions_vs_fixed_increment": evicted["adaptive"] / max(1, evicted["fixed"]),
    }


_NOTES = (
    "op_us_at_1e6: the dearest of insert, evict and free, per page, at a million live pages",
    "tree_us_at_1e6: the dearest operation on the tree alone, at a million nodes",
    "effective_over_theoretical_worst: least payload / held bytes (page tables and records "
    "included) at any moment when at least half of the mean peak is alive",
    "effective_over_theoretical_worst_at_peaks: the same at every iteration's peak, however small",
    "fixed: whole steps of 100 MB; fixed-cut: also a last step cut to what the cap leaves",
    "cap_halved_ms: the slowest of all halvings, memory returned to the system included",
    "halved_gradient_error_vs_predicted: growth of the gradient's squared error when the cap is "
    "halved between forward and backward / what the planes lost foretell",
    "training_*: ResNet-20's steps with widths that move by a bit at a fifth of the sites after "
    "each; worst and drift where forward passes end, in the loop's own pool",
)


# --- (a) time of an operation ---------------------------------------------------------------


def time_rows(job: PoolJob, on_progress: Progress) -> list[Row]:
    """Microseconds of insert, evict and free, in the pool and in its tree alone."""
    rows: list[Row] = []
    for live in _TIMED_PAGES:
        on_progress(f"operations at {live:,} live pages")
        for runs in _RUNS_PER_PLANE:
            costs = _native.operation_ns(live, runs, job.rounds, 0)
            pages = (2 * runs, 1, 2 * runs)
            rows += _time_rows(f"pool, runs of {runs}", live, costs, pages)
        rows += _time_rows("tree", live, _native.tree_ns(live, job.rounds, 0), (1, 1, 1))
    return rows


def _time_rows(
    what: str, live: int, costs_ns: tuple[float, ...], pages: tuple[int, ...]
) -> list[Row]:
    names = ("insert", "evict", "free")
    return [
        {
            "part": "time",
            "what": what,
            "operation": name,
            "live": live,
            "pages": count,
            "us": cost / 1e3,
            "us_per_page": cost / 1e3 / count,
        }
        for name, cost, count in zip(names, costs_ns, pages, strict=True)
    ]


# --- (b) fragmentation ----------------------------------------------------------------------


def stress_rows(job: PoolJob, on_progress: Progress) -> list[Row]:
    """Payload over held bytes of every contestant on one trace."""
    operations, tensors = make_operations(Shape(job.stress_iterations))
    page_bytes = choose_page_bytes(tensors, waste=_PADDING_AND_TABLES)
    rows = []
    for contestant in CONTESTANTS:
        on_progress(f"{job.stress_iterations:,} iterations on {contestant}")
        samples, seconds = play(contestant, page_bytes, None, operations)
        row = waste_of(operations, samples)
        rows.append({"part": "stress", "contestant": contestant, "seconds": seconds, **row})
    rows[0]["page_bytes"] = page_bytes
    return rows


# --- (c) growth -----------------------------------------------------------------------------


def growth_rows(job: PoolJob, on_progress: Progress) -> list[Row]:
    """Evictions, bytes held and time of each rule under a cap a tenth above the mean peak."""
    large = Shape(job.growth_iterations, least_count=2**19, most_count=2**26, minimum_bits=1)
    operations, tensors = make_operations(large)
    page_bytes = choose_page_bytes(tensors)
    cap = usual_cap(page_bytes, operations)
    rows = []
    for rule in GROWTH_RULES:
        on_progress(f"growth: {rule}")
        samples, seconds = play(rule, page_bytes, cap, operations)
        rows.append({"part": "growth"} | growth_row(rule, page_bytes, cap, samples, seconds))
    return rows


# --- (d) a cap halved -----------------------------------------------------------------------


def halving_rows(job: PoolJob, on_progress: Progress) -> list[Row]:
    """Milliseconds until half of a full pool is gone, and the error its codes have then."""
    return [_halve(job.halved_bytes, seed, on_progress) for seed in range(job.halvings)]


def _halve(total_bytes: int, seed: int, on_progress: Progress) -> Row:
    on_progress(f"cap halved, {seed}")
    store = PagedStore()
    tensors = _fill(store, total_bytes, np.random.default_rng(seed))
    held = store.statistics().held_bytes
    start = time.perf_counter()
    given = store.set_cap(held // 2)
    spent_ms = 1e3 * (time.perf_counter() - start)
    now = store.statistics()
    return {
        "part": "halving",
        "held_bytes": held,
        "held_after_bytes": now.held_bytes,
        "evicted_pages": given.pages,
        "returned_bytes": given.returned_bytes,
        "over_bytes": given.over_bytes,
        "ms": spent_ms,
        "predicted_relative_error": statistics.mean(map(_predicted_error, tensors)),
        "relative_error_before": rotated_error(4, 4),
    }


def _fill(store: PagedStore, total_bytes: int, random: np.random.Generator) -> list[PlaneTensor]:
    """4-bit tensors of random sizes, every page written."""
    tensors: list[PlaneTensor] = []
    while store.live_bytes < total_bytes:
        count = int(random.integers(2**18, 2**23))
        tensor = store.allocate_planes(count, 4, minimum_bits=1, tag=len(tensors))
        view = tensor.view
        pages = Pages(view)
        for run in range(pages.runs):
            for address in pages.planes(run):
                ctypes.memset(address, 1, store.page_bytes)
            ctypes.memset(pages.headers(run), 1, store.page_bytes // 8)
        tensor.seal()
        tensors.append(tensor)
    return tensors


def _predicted_error(tensor: PlaneTensor) -> float:
    with tensor.pinned() as view:
        pages = Pages(view)
        return statistics.mean(rotated_error(4, pages.kept_bits(run)) for run in range(pages.runs))
