"""``daf bench values``: what exact recomputation saves of each workload, and what it costs.

``compress(bits="exact")`` and plain PyTorch take a forward and a backward pass in turn, each in a
process of its own, on the same model and batch, the whole batch at once. Plain runs twice, so that
the same beside itself says what the machine's noise is. Gradients are compared bit for bit, from
the same random state. Then whole steps of exact sessions run beside those of ``rivals``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np
import torch

from daf_bench.doors.interval import LEAST_PAIRS, interval_of
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.harness.subprocess_channel import Child
from daf_bench.values import rivals
from daf_bench.values.child import Side
from daf_bench.workloads.sources import Sources, default_sources

# The workloads, by the names of their models in the figures.
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "w1": "resnet18",
        "w2a": "resnet50",
        "w2b": "densenet121",
        "w2c": "mobilenet_v2",
        "w3": "bert_small",
        "w4": "gpt2",
    }
)
MOST_STEP = 1.15  # of plain's, at which saved bytes count
MOST_WIDTH = 0.04  # design, section 9
SIDES = PLAIN, EXACT, AGAIN = "plain", "exact", "plain again"
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ValuesJob:
    """``pairs`` of each, more while an interval is too wide, ``most_pairs`` at most."""

    workloads: tuple[str, ...] = tuple(MODELS)
    pairs: int = LEAST_PAIRS
    most_pairs: int = 40
    is_small: bool = False
    has_rivals: bool = True
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> ValuesJob:
    """Small inputs and no rivals: seconds each; times say little."""
    return ValuesJob(most_pairs=LEAST_PAIRS, is_small=True, has_rivals=False)


def run(
    job: ValuesJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends; rivals' rows lie beside it."""
    described = {**asdict(replace(job, sources=Sources())), "sources": job.sources.described()}
    del described["has_rivals"], described["workloads"]  # later runs may ask for more
    log = RowLog(rows_file, described)
    for place, name in enumerate(job.workloads):

        def report(what: str, name: str = name, place: int = place) -> None:
            on_progress(f"{name}: {what}", place, len(job.workloads))

        log.row(name, lambda: _row(job, name, report))  # noqa: B023
        log.row(f"{name}: recording", lambda: _recording_row(job, name, report))  # noqa: B023
    notes = (
        f"forward and backward on {torch.get_num_threads()} threads; data: "
        f"{job.sources.described()}",
        f"*_saved_ratio_115: plain's saved bytes over ours, 0 where the step takes more than "
        f"{MOST_STEP} of plain's (near end)",
        "recording_share_*: recording values and looking them up, in shares of plain's step, each "
        "by its own clock; unused_recorders: how many were made where nothing is computed again",
        "forward_more_*: what forward takes more, recording and what is coded, in the same shares "
        "(near end)",
    )
    figures, beside = figures_of(log.rows), []
    if job.has_rivals:
        file = rows_file and rows_file.with_stem(f"{rows_file.stem}_rivals")
        beside = rivals.measure(job.workloads, job.sources, file, on_progress)
        figures |= rivals.figures_of(beside)
    return BenchResult("values", [*log.rows, *beside], figures, (*notes, *rivals.NOTES))


def _row(job: ValuesJob, name: str, report: Callable[[str], None]) -> Row:
    report("loading")
    found: dict[str, list[float]] = {label: [] for label in SIDES}
    forward: dict[str, list[float]] = {label: [] for label in SIDES}
    with _processes(job, name) as sides, TemporaryDirectory() as folder:
        report("gradients")
        files = {label: Path(folder) / label for label in sides}
        told = {label: side.ask("gradient", files[label]) for label, side in sides.items()}
        gradients = {label: np.fromfile(file, np.uint32) for label, file in files.items()}
        while _wants_more(job, found):
            count = len(found[PLAIN])
            report(f"pair {count + 1} of {job.pairs} or more")
            for label in list(sides) if count % 2 == 0 else [*reversed(sides)]:
                taken = sides[label].ask("pass")
                found[label].append(taken["ms"])
                forward[label].append(taken["forward_ms"])
    return {
        "workload": name,
        "model": MODELS.get(name, name),
        **told[EXACT],
        "is_repeatable": np.array_equal(gradients[PLAIN], gradients[AGAIN]),
        "is_equal": np.array_equal(gradients[PLAIN], gradients[EXACT]),
        "ms": found,
        "forward_ms": forward,
    }


@contextmanager
def _processes(
    job: ValuesJob, name: str, labels: tuple[str, ...] = SIDES
) -> Iterator[dict[str, Child]]:
    folder = None if job.sources.folder is None else str(job.sources.folder)
    with ExitStack() as stack:
        sides = {}
        for label in labels:
            side = asdict(Side(name, folder, job.is_small, label == EXACT))
            sides[label] = Child("daf_bench.values.child", side, f"{name}, {label}")
            stack.callback(sides[label].end)
        yield sides


def _recording_row(job: ValuesJob, name: str, report: Callable[[str], None]) -> Row:
    report("recording")
    named = {"workload": name, "model": MODELS.get(name, name)}
    with _processes(job, name, (EXACT,)) as sides:
        return named | sides[EXACT].ask("recording")


def _ratios(found: dict[str, list[float]]) -> Iterator[tuple[str, list[float]]]:
    for label in (EXACT, AGAIN):
        pairs = zip(found[label], found[PLAIN], strict=True)
        yield label, [one / other for one, other in pairs]


def _wants_more(job: ValuesJob, found: dict[str, list[float]]) -> bool:
    count = len(found[PLAIN])
    if count < job.pairs:
        return True
    widest = max(interval_of(each).half_width for _, each in _ratios(found))
    return count < job.most_pairs and widest > MOST_WIDTH


def _recording_shares(rows: list[Row]) -> Iterator[float]:
    """What recording and look-ups take, in shares of plain's whole step."""
    steps = {row["workload"]: median(row["ms"][PLAIN]) for row in rows if "ms" in row}
    for row in rows:
        if "recording_ms" in row:
            yield (row["recording_ms"] + row["look_up_ms"]) / steps[row["workload"]]


def _forward_more(row: Row) -> float:
    """What forward takes more than plain's, in shares of plain's whole step (near end)."""
    forward, whole_ms = row["forward_ms"], median(row["ms"][PLAIN])
    pairs = zip(forward[EXACT], forward[PLAIN], strict=True)
    return max(0.0, interval_of([one - other for one, other in pairs]).low) / whole_ms


def figures_of(found: list[Row]) -> dict[str, float]:
    """The figures; of intervals the near ends."""
    rows = [row for row in found if "ms" in row]
    unused = sum(row.get("unused_recorders", 0) for row in found)
    figures: dict[str, float] = {}
    intervals = [{label: interval_of(r) for label, r in _ratios(row["ms"])} for row in rows]
    for row, ratios in zip(rows, intervals, strict=True):
        saved = row["saved_bytes_plain"] / row["saved_bytes"]
        within = ratios[EXACT].low <= MOST_STEP
        figures[f"{row['model']}_saved_ratio_115"] = saved if within else 0.0
        figures[f"{row['model']}_step"] = ratios[EXACT].middle
    widths = [each.half_width for ratios in intervals for each in ratios.values()]
    return {
        **figures,
        "step_worst": max((each[EXACT].low for each in intervals), default=float("nan")),
        "plain_over_itself_worst": max((e[AGAIN].low for e in intervals), default=float("nan")),
        "width_worst": max(widths, default=float("nan")),
        "recording_share_worst": max(_recording_shares(found), default=float("nan")),
        "unused_recorders": unused,
        "forward_more_worst": max(map(_forward_more, rows), default=float("nan")),
        "compared": sum(row["is_repeatable"] for row in rows),
        "mismatches": sum(row["is_repeatable"] and not row["is_equal"] for row in rows),
    }
