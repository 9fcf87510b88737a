"""``daf bench hosts``: each host alone and within a budget, for the same updates and in turn.

Two measurements a host. *Exact*: as many updates alone, and at ``tolerance=0`` within the budget of
its floor and 45 % of its peak above it; the parameters afterwards are compared. *In turn*: the
session's own tolerance within that budget, stepped beside the host alone, until intervals are
narrow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from daf_bench.doors.interval import LEAST_PAIRS
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.harness.subprocess_channel import ContestantError
from daf_bench.hosts.catalogue import HOSTS, missing
from daf_bench.hosts.exact import measure_exact
from daf_bench.hosts.figures import MOST_APART, PERCENT, figures_of
from daf_bench.hosts.in_turn import WARM_UP_UPDATES, measure_in_turn
from daf_bench.hosts.lines import lines_changed
from daf_bench.hosts.setting import ACCUMULATED, Setting
from daf_bench.workloads.sources import Sources, default_sources

Report = Callable[[str, int, int], None]
PARTS = 2  # rows a host


@dataclass(frozen=True, slots=True)
class HostsJob:
    """``updates`` are compared; ``pairs`` are timed, more while an interval is too wide."""

    hosts: tuple[str, ...] = tuple(HOSTS)
    updates: int = 20
    pairs: int = LEAST_PAIRS
    most_pairs: int = 40
    is_small: bool = False
    batch_size: int | None = None
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> HostsJob:
    """Half of the batch, few updates: some minutes a host."""
    return HostsJob(updates=4, most_pairs=LEAST_PAIRS, batch_size=16)


def run(
    job: HostsJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    described = {**asdict(replace(job, sources=Sources())), "sources": job.sources.described()}
    log = RowLog(rows_file, described)
    for host in job.hosts:

        def report(what: str, host: str = host) -> None:
            on_progress(f"{host}: {what}", len(log.rows), PARTS * len(job.hosts))

        _host(job, host, log, report)
    return BenchResult("hosts", log.rows, figures_of(log.rows), _notes(job))


def _host(job: HostsJob, host: str, log: RowLog, report: Callable[[str], None]) -> None:
    lacking = missing(host)
    if lacking:
        reason = f"{', '.join(lacking)} not installed"
        log.row(f"{host}: skipped", lambda: {"part": "skipped", "host": host, "reason": reason})
        return
    with tempfile.TemporaryDirectory() as folder:
        setting = _setting(job, host, Path(folder))
        log.row(
            f"{host}: exact", lambda: _kept("exact", host, lambda: measure_exact(setting, report))
        )
        timed = replace(setting, updates=WARM_UP_UPDATES + job.most_pairs + 1)
        log.row(
            f"{host}: in turn",
            lambda: _kept(
                "in turn", host, lambda: measure_in_turn(timed, job.pairs, job.most_pairs, report)
            ),
        )


def _setting(job: HostsJob, host: str, folder: Path) -> Setting:
    data = job.sources.folder
    return Setting(
        host, str(folder), job.updates, str(data) if data else None, job.is_small, job.batch_size
    )


def _kept(part: str, host: str, measure: Callable[[], Row]) -> Row:
    """The row, or what ended it."""
    row = {"part": part, "host": host, "lines_changed": lines_changed(host)}
    try:
        return row | measure()
    except ContestantError as error:
        return {**row, "failed": str(error)}


def _notes(job: HostsJob) -> tuple[str, ...]:
    data = "E2E's words" if job.sources.restaurants else "made-up words"
    return (
        f"a Llama's shape over {data}; {ACCUMULATED} batches an update, clipped, AdamW; a budget "
        f"of the host's floor and {PERCENT} % of its peak above it",
        f"mismatches: parameters apart by more than {MOST_APART:g} of what {job.updates} updates "
        "moved them, at tolerance 0",
        "lines changed: imports and indentation not counted, loss and backward pass on one line; "
        "TRL's checkpointing, on by default, is off on both sides, and its buffer of logits is as "
        "wide as the vocabulary",
        "worst: the near end of the median's 95 % interval of updates stepped in turn",
    )
