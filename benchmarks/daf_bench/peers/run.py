"""``daf bench peers``: every alternative a user has, beside DAF, on the design's workloads.

Each contestant is a process of its own with its own high-water mark. Plain
PyTorch's stays alive; each of the others is stepped in turn with it, so that a
noisy machine falls on both, and ends before the next one starts, so that no
more than two models are in memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daf_bench.harness.method_runner import Contender, Way
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.harness.subprocess_channel import ContestantError, TooLateError
from daf_bench.peers.duel import measure_duel, pairs_of
from daf_bench.peers.figures import figures_of
from daf_bench.peers.row import Plain, check_time, measure_beside, plain_row
from daf_bench.peers.table import FULL, LEAST, LEAST_TRIES, PLAIN, QUICK, Asked
from daf_bench.peers.verdicts import DUEL
from daf_bench.sweep.figures import BATCH_STATISTICS
from daf_bench.workloads import WORKLOADS
from daf_bench.workloads.sources import Sources, default_sources

# Two of W2's models have hundreds of kernels to compile, and are left to the full comparison.
QUICK_WORKLOADS = ("w1", "w2c", "w3", "w4", "w5", "w6")
# Half of the design's batches, where a step of them takes four seconds on two cores.
QUICK_BATCHES = (("w3", 32), ("w4", 4))
QUICK_MINUTES = 28.0
# More steps where they take a fraction of a second: noise, and plans that are still searched for.
# One less in the full comparison where a step takes over four seconds.
QUICK_STEPS = (("w2c", 4), ("w6", 20))
FULL_STEPS = (("w2c", 12), ("w3", 5), ("w4", 5), ("w6", 40))
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PeersJob:
    """What is run. ``batch_sizes`` are those that are not the workload's own.

    ``steps`` are timed of everybody, but for workloads with ``step_counts`` of their own; half
    as many, two at least, come before them.

    ``minutes``: when they are over whoever runs is ended, and nobody starts. Whoever compiles
    then comes after everybody else on all workloads, one way of compiling after the other.

    ``has_duels``: DAF and whoever came nearest to it are stepped in turn with each other too.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    contestants: tuple[Asked, ...] = FULL
    steps: int = 6
    step_counts: tuple[tuple[str, int], ...] = FULL_STEPS
    batch_sizes: tuple[tuple[str, int], ...] = ()
    minutes: float | None = None
    has_duels: bool = True
    seed: int = 0
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> PeersJob:
    """The design's workloads in less than half an hour on two cores.

    Fewer steps (too few for losses), fewer contestants, all beside plain alone, of W2
    MobileNet-v2 alone, and half of the batches of W3 and W4; models, images and sentences at
    their full size.
    """
    return PeersJob(
        *(QUICK_WORKLOADS, QUICK),
        steps=2,
        step_counts=QUICK_STEPS,
        batch_sizes=QUICK_BATCHES,
        minutes=QUICK_MINUTES,
        has_duels=False,
    )


def run(
    job: PeersJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run every contestant beside plain PyTorch, going on where ``rows_file`` ends."""
    log = RowLog(rows_file, _measured(job))
    until_s = None if job.minutes is None else time.monotonic() + 60 * job.minutes
    found: dict[str, dict[str, Row]] = {name: {} for name in job.workloads}
    labels = (PLAIN, *(asked.label for asked in job.contestants))
    expected = [_name(name, label) for name in job.workloads for label in labels]

    def of_workload(name: str) -> _Workload:
        def say(what: str) -> None:
            on_progress(_name(name, what), sum(map(log.has, expected)), len(expected))

        return _Workload(job, name, log, until_s, say)

    for contestants in _rounds(job):
        for name in job.workloads:
            rows = of_workload(name).rows(contestants)
            found[name] |= {row["contestant"]: row for row in rows}
    in_order = [row for of in found.values() for row in of.values()]
    if job.has_duels:
        for name, own in found.items():
            in_order += of_workload(name).duels(own)
    return BenchResult("peers", in_order, figures_of(in_order), _notes(job))


def _name(workload: str, label: str) -> str:
    """A row's, in the log and to whoever watches."""
    return f"{workload}: {label}"


def _rounds(job: PeersJob) -> list[tuple[Asked, ...]]:
    """Where time is short, compilers may have what the others leave, one after the other."""
    if job.minutes is None:
        return [job.contestants]
    compiling = [(asked,) for asked in job.contestants if asked.compiles]
    return [tuple(asked for asked in job.contestants if not asked.compiles), *compiling]


def _measured(job: PeersJob) -> dict[str, Any]:
    """What a row depends on beside its own name, so that later runs may ask for more of them."""
    return {
        "steps": job.steps,
        "step_counts": dict(job.step_counts),
        "seed": job.seed,
        "is_small": job.is_small,
        "batch_sizes": dict(job.batch_sizes),
        "sources": job.sources.described(),
    }


def _notes(job: PeersJob) -> tuple[str, ...]:
    sizes = "small sizes" if job.is_small else "full sizes"
    batches, counts = (_told(own, job) for own in (job.batch_sizes, job.step_counts))
    return (
        f"{', '.join(job.workloads)}; {sizes}{batches and f', batches: {batches}'}; "
        f"{job.steps} timed steps{counts and f' ({counts})'}; data: {job.sources.described()}",
        "step ratios are medians over interleaved pairs with plain; half as many steps before "
        "them, two at least (compiling, measuring), are not timed",
        "peaks are whole-process high-water marks less plain's floor; steady ones leave the "
        "first steps out",
        "plain's first optimizer step imports torch's compiler, which stays in memory; DAF's "
        "sessions and the codes keep it out, as “plain, no compiler loaded” of the full comparison",
        "accumulation changes batch statistics, and so the mathematics, where a model has them",
        "compiled code and pieces of a batch draw other random numbers for dropout (w3, w4): their "
        "gradient's error is then mostly dropout's",
    )


def _told(own: tuple[tuple[str, int], ...], job: PeersJob) -> str:
    """What workloads of this job have of their own."""
    return ", ".join(f"{name} {value}" for name, value in own if name in job.workloads)


class _Workload:
    """One workload: its plain contestant stays alive while any other needs it."""

    def __init__(
        self,
        job: PeersJob,
        name: str,
        log: RowLog,
        until_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._job, self._name, self._log = job, name, log
        self._until_s, self._say = until_s, say
        self._steps = dict(job.step_counts).get(name, job.steps)
        folder = job.sources.folder
        self._way = Way(
            name,
            str(folder) if folder else None,
            job.is_small,
            dict(job.batch_sizes).get(name),
            keeps_first_state=True,
            seed=job.seed,
        )
        self._plain: Plain | None = None

    def rows(self, contestants: tuple[Asked, ...]) -> list[Row]:
        """Plain's row, then theirs in their order; what came too late is told, not kept."""
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            self._stack, self._folder = stack, Path(folder)
            own = self._row(Asked(PLAIN), self._measure_plain)
            if "step_ms" not in own:  # too late, or without what it takes: so are all
                return [own]
            return [own, *(self._beside(asked, own) for asked in contestants)]

    def duels(self, found: Mapping[str, Row]) -> list[Row]:
        """Pairs of those rows' contestants in turn with each other; none that came too late."""
        rows = (self._duel(pair, found[PLAIN]) for pair in pairs_of(list(found.values())))
        return [row for row in rows if row is not None]

    def _duel(self, labels: tuple[str, str], plain: Row) -> Row | None:
        asked = {each.label: each for each in self._job.contestants}
        ours, theirs = (self._way_of(asked[label], plain) for label in labels)
        between = f"{labels[0]} beside {labels[1]}"
        self._say(between)
        named: Row = {"workload": self._name, "kind": DUEL}
        named |= zip(("contestant", "against"), labels, strict=True)
        try:
            return self._log.row(
                _name(self._name, between),
                lambda: {**named, **measure_duel(ours, theirs, self._steps, self._until_s)},
            )
        except TooLateError:
            return None

    def _way_of(self, asked: Asked, plain: Row) -> Way:
        return replace(self._way, **asked.changes, budget_bytes=_budget(asked, plain))

    def _beside(self, asked: Asked, plain: Row) -> Row:
        way = self._way_of(asked, plain)

        def measured(way: Way) -> Row:
            where = self._steps, self._folder, self._until_s
            return measure_beside(way, self._running_plain, plain, *where)

        def make() -> Row:
            row, tries = measured(way), LEAST_TRIES if asked.percent == LEAST else 0
            while tries and row.get("least_bytes"):  # with more room it knows its least better
                row, tries = measured(replace(way, budget_bytes=row["least_bytes"])), tries - 1
            return row

        return self._row(asked, make)

    def _row(self, asked: Asked, make: Callable[[], Row]) -> Row:
        self._say(asked.label)
        named: Row = {
            "workload": self._name,
            "contestant": asked.label,
            "kind": asked.kind,
            "percent": asked.percent,
            "same_mathematics": _computes_the_same(asked, self._name),
        }
        try:
            return self._log.row(_name(self._name, asked.label), lambda: {**named, **make()})
        except TooLateError:
            return {
                **named,
                "late": "there was not time enough for it; with --out the same command goes on",
            }
        except ContestantError as error:  # plain's own, such as a library that is not installed
            return {**named, "failed": str(error)}

    def _measure_plain(self) -> Row:
        check_time(self._until_s, self._name)
        child = self._start_plain()
        row = plain_row(child, self._steps)
        self._plain = Plain(child, self._folder / PLAIN)
        return {**row, "saved_bytes_peak": self._plain.saved_bytes}

    def _running_plain(self) -> Plain:
        """Warm, and its gradient written; started anew where rows of before are at hand."""
        if self._plain is None:
            child = self._start_plain()
            child.step()
            self._plain = Plain(child, self._folder / PLAIN)
        return self._plain

    def _start_plain(self) -> Contender:
        child = Contender(self._way)
        self._stack.callback(child.end)
        return child


def _computes_the_same(asked: Asked, workload: str) -> bool:
    """Pieces of a batch have batch statistics of their own."""
    return asked.changes.get("peer") != "accumulate" or workload not in BATCH_STATISTICS


def _budget(asked: Asked, plain: Row) -> int | None:
    if asked.percent is None:
        return None
    floor, peak = plain["floor_bytes"], plain["peak_bytes"]
    return int(floor + asked.percent * (peak - floor) / 100)
