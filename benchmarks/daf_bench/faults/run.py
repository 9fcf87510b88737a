"""Runs the parts of ``daf bench faults`` piece by piece, and adds up what they count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from daf_bench.faults.refusals import QUICK_FAMILIES, all_families, run_refusals
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import RowLog

Counts = dict[str, int]
Report = Callable[[str, int, int], None]

# Where each part is, how many a whole run tries, and how many of them one row counts.
_DRAWN = {
    "falls": ("falls", "run_falls", 10_000, 250),
    "sequences": ("sequences", "run_sequences", 1_000, 50),
    "damaged": ("on_disk.damaged", "run_damaged", 500, 25),
    "kills": ("on_disk.kills", "run_kills", 300, 20),
    "hostile": ("on_disk.hostile", "run_hostile", 500, 25),
    "full_disk": ("on_disk.full_disk", "run_full_disk", 100, 10),
}
PARTS = ("refusals", *_DRAWN)
_QUICK_SHARE = 50  # a quick run tries one of so many


@dataclass(frozen=True, slots=True)
class FaultsJob:
    """Which parts, the seed of all that is drawn, and if only a few of each are tried."""

    parts: tuple[str, ...] = PARTS
    seed: int = 0
    quick: bool = False


def run(
    job: FaultsJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run every piece of every part, going on where ``rows_file`` ends.

    PyTorch gets one thread before families are made: in a fork of a process whose OpenMP has
    threads, which the fork has not, two threads wait for ever.
    """
    torch.set_num_threads(1)
    log = RowLog(rows_file, {"seed": job.seed, "quick": job.quick})
    pieces = [piece for part in job.parts for piece in _pieces(part, job)]
    for place, (name, work) in enumerate(pieces):
        on_progress(name, place, len(pieces))
        log.row(name, partial(_as_row, name, work))
    rows = [row for row in log.rows if row["part"] in job.parts]
    share = "a fiftieth of everything" if job.quick else "everything"
    words = f"{share} of {', '.join(job.parts)}; seed {job.seed}"
    return BenchResult("faults", rows, figures_of(rows), (words,))


def figures_of(rows: list[dict[str, int]]) -> dict[str, float]:
    """Return the sum of every count over all rows."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: n for name, n in row.items() if name not in ("part", "piece")})
    return dict(total)


def _as_row(name: str, work: Callable[[], Counts]) -> dict[str, object]:
    part, _, piece = name.partition(" ")
    return {"part": part, "piece": piece, **work()}


def _pieces(part: str, job: FaultsJob) -> Iterator[tuple[str, Callable[[], Counts]]]:
    if part == "refusals":
        for family in QUICK_FAMILIES if job.quick else all_families():
            yield (f"refusals {family}", partial(run_refusals, job.seed, [family], quick=job.quick))
        return
    module, function, count, in_one = _DRAWN[part]
    count = max(1, count // _QUICK_SHARE) if job.quick else count
    for place, first in enumerate(range(0, count, in_one)):
        tries = min(in_one, count - first)
        seed = job.seed * (count // in_one + 1) + place
        yield f"{part} {place}", partial(_drawn, module, function, tries, seed)


def _drawn(module: str, function: str, count: int, seed: int) -> Counts:
    """Import a part only where it runs: some need what the quick ones do not."""
    found: Counts = getattr(import_module(f"daf_bench.faults.{module}"), function)(count, seed)
    return found
