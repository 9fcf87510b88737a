"""``daf bench doors``: the session's step, ``session.backward`` and ``compress(budget=)``, in turn.

Plain PyTorch alone says what a budget of 50 % is. Then each door trains in a process of its own
under that budget, never cutting the batch, all stepped in turn; the session's step runs twice, so
that the same beside itself says what the machine's noise is. Gradients are compared with plain's
under a wider budget at ``tolerance=0``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from daf_bench.doors.fixed_cost import fixed_costs
from daf_bench.doors.interval import LEAST_PAIRS, interval_of
from daf_bench.doors.loops import ACCUMULATED, DOORS
from daf_bench.harness.method_runner import Contender, Way
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.harness.subprocess_channel import ContestantError
from daf_bench.sweep.point import gradient_error, measure_plain
from daf_bench.workloads.sources import Sources, default_sources

WORKLOADS = ("w1", "w3", "w4", "w6")
PERCENT, EXACT_PERCENT = 50, 90
WARM_UP_STEPS, PLAIN_STEPS = 6, 2
MOST_WIDTH = 0.04  # design, section 9
MOST_RELATIVE_ERROR = 1e-4  # reordered sums
AGAIN = "step again"
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DoorsJob:
    """``pairs`` are run of each door, more while an interval is too wide, ``most_pairs`` at most.

    ``steps``: of the network whose fixed cost is taken.
    """

    workloads: tuple[str, ...] = WORKLOADS
    pairs: int = LEAST_PAIRS
    most_pairs: int = 40
    steps: int = 400
    is_small: bool = False
    batch_sizes: tuple[tuple[str, int], ...] = ()
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> DoorsJob:
    """Half of the batches of W3 and W4, some minutes each."""
    return DoorsJob(batch_sizes=(("w3", 16), ("w4", 2)), most_pairs=LEAST_PAIRS)


def run(
    job: DoorsJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    described = {**asdict(replace(job, sources=Sources())), "sources": job.sources.described()}
    log = RowLog(rows_file, described)
    expected = len(job.workloads) * (1 + len(DOORS) + 1) + 1
    for name in job.workloads:

        def report(what: str, name: str = name) -> None:
            on_progress(f"{name}: {what}", len(log.rows), expected)

        _workload(job, name, log, report)
    on_progress("fixed cost", len(log.rows), expected)
    log.row("fixed", lambda: {"part": "fixed", **fixed_costs(job.steps)})
    return BenchResult("doors", log.rows, figures_of(log.rows), _notes(job))


def _workload(job: DoorsJob, name: str, log: RowLog, report: Callable[[str], None]) -> None:
    folder = job.sources.folder
    batch_size = dict(job.batch_sizes).get(name)
    way = Way(name, str(folder) if folder else None, job.is_small, batch_size)
    with tempfile.TemporaryDirectory() as kept:
        gradient = Path(kept) / "plain"
        report("plain")
        plain = log.row(f"{name}: plain", lambda: _plain(way, gradient))
        for door in DOORS:
            report(f"gradient by {door}")
            exact = replace(way, door=door, tolerance=0.0)
            exact = replace(exact, budget_bytes=_share(plain, EXACT_PERCENT))
            log.row(f"{name}: gradient by {door}", lambda: _gradient(exact, way, Path(kept)))  # noqa: B023
        bounded = replace(way, budget_bytes=_share(plain, PERCENT))
        log.row(f"{name}: in turn", lambda: _in_turn(job, bounded, report))


def _share(plain: Row, percent: int) -> int:
    floor, peak = plain["floor_bytes"], plain["peak_bytes"]
    return int(floor + percent * (peak - floor) / 100)


def _plain(way: Way, gradient: Path) -> Row:
    child = Contender(replace(way, gradient_file=str(gradient)))
    try:
        child.step()
        return {"part": "plain", "workload": way.workload, **measure_plain(child, PLAIN_STEPS)}
    finally:
        child.end()


def _gradient(way: Way, plain: Way, folder: Path) -> Row:
    """The first step's gradient beside plain's of the same weights and batch, in processes."""
    row: Row = {"part": "gradient", "workload": way.workload, "door": way.door}
    for each, file in ((plain, "plain"), (way, "ours")):
        child = Contender(replace(each, gradient_file=str(folder / file)))
        try:
            found = child.step()
        except ContestantError as error:
            return {**row, "failed": str(error)}
        finally:
            child.end()
        if "raised" in found:
            return {**row, "refused": found["raised"], "budget_bytes": way.budget_bytes}
    scale = float(ACCUMULATED) if way.door == "backward" else 1.0
    error = gradient_error(folder / "ours", folder / "plain", scale)
    return {**row, "gradient_error": error, "is_over": found["peak_bytes"] > way.budget_bytes}


def _in_turn(job: DoorsJob, way: Way, report: Callable[[str], None]) -> Row:
    """Every door's step beside the session's, in turn, until intervals are narrow."""
    row: Row = {"part": "in turn", "workload": way.workload, "budget_bytes": way.budget_bytes}
    with ExitStack() as stack:
        children: dict[str, Contender] = {}
        for label in (*DOORS, AGAIN):
            door = "step" if label == AGAIN else label
            children[label] = Contender(replace(way, door=door))
            stack.callback(children[label].end)
        found, refusals = _warmed(children, report)
        while not refusals and _wants_more(job, found):
            report(f"pair {len(found['step']) + 1} of {job.pairs} or more")
            _one_round(children, found, len(found["step"]))
        peaks = {label: child.facts()["session_peak_bytes"] for label, child in children.items()}
    over = {label: peak > (way.budget_bytes or 0) for label, peak in peaks.items()}
    return {**row, "ms": found, "refused": refusals, "peak_bytes": peaks, "is_over": over}


def _warmed(
    children: dict[str, Contender], report: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    refusals = {}
    for label, child in children.items():
        report(f"{label} warms up")
        for _ in range(WARM_UP_STEPS):
            done = child.step()
            if "raised" in done:
                refusals[label] = done["raised"]
                break
    return {label: [] for label in children}, refusals


def _one_round(children: dict[str, Contender], found: dict[str, list[float]], index: int) -> None:
    """One step of each, the order alternating; as many as make an update where it accumulates."""
    order = list(children) if index % 2 == 0 else [*reversed(children)]
    for label in order:
        count = ACCUMULATED if label == "backward" else 1
        times = [children[label].step()["step_ms"] for _ in range(count)]
        found[label].append(sum(times) / count)


def _ratios(found: dict[str, list[float]]) -> Iterator[tuple[str, list[float]]]:
    for label, times in found.items():
        if label != "step":
            pairs = zip(times, found["step"], strict=True)
            yield label, [one / other for one, other in pairs]


def _wants_more(job: DoorsJob, found: dict[str, list[float]]) -> bool:
    count = len(found["step"])
    if count < job.pairs:
        return True
    widths = [interval_of(ratios).half_width for _, ratios in _ratios(found)]
    return count < job.most_pairs and max(widths) > MOST_WIDTH


def figures_of(rows: list[Row]) -> dict[str, float]:
    """The figures; of intervals the near ends."""
    turns = [row for row in rows if row["part"] == "in turn" and not row["refused"]]
    gradients = [row for row in rows if row["part"] == "gradient"]
    fixed: dict[str, Any] = next((row for row in rows if row["part"] == "fixed"), {})
    intervals = [
        {label: interval_of(ratios) for label, ratios in _ratios(row["ms"])} for row in turns
    ]
    refused = sum(bool(row["refused"]) for row in rows if row["part"] == "in turn")
    over = sum(sum(row["is_over"].values()) for row in rows if row["part"] == "in turn")
    compared = [row for row in gradients if "gradient_error" in row]
    worst = {
        label: max((each[label].low for each in intervals), default=float("nan"))
        for label in (*DOORS[1:], AGAIN)
    }
    return {
        **{f"{label}_over_step_worst": worst[label] for label in DOORS[1:]},
        "step_over_itself_worst": worst[AGAIN],
        "width_worst": max(
            (each.half_width for found in intervals for each in found.values()),
            default=float("nan"),
        ),
        "over_budget": over + sum(row["is_over"] for row in compared),
        "refused": refused + sum("refused" in row for row in gradients),
        "failed": sum("failed" in row for row in gradients),
        "gradients_tried": len(compared),
        "mismatches": sum(row["gradient_error"] > MOST_RELATIVE_ERROR for row in compared),
        "fixed_ms": max((fixed[door] for door in DOORS if door in fixed), default=float("nan")),
    }


def _notes(job: DoorsJob) -> tuple[str, ...]:
    return (
        f"{', '.join(job.workloads)}; budgets of {PERCENT} %, gradients at {EXACT_PERCENT} %; "
        f"data: {job.sources.described()}",
        f"backward: {ACCUMULATED} batches, clipping and an update, a batch's share of their time",
        "worst: the near end of the median's 95 % interval; step over itself: the same door twice",
        "fixed_ms: the dearest door's step less plain's, on a two-layer network",
    )
