"""``daf bench survival``: random models under random budgets, in memory cgroups of that size.

Each run finishes within its budget or is refused before training; none is killed. Budgets move
while some train, NumPy arrays come and go, gradients are released (``random_events``). The
system's page cache is dropped before, so that a group is charged with the libraries that it reads.
Every refusal is tried: the least budget that it names must finish, and 10 % less of it above what
the process held beside mapped files seldom does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from daf_bench.harness import cgroup
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.memory.random_events import draw_events
from daf_bench.memory.random_models import described, draw

TEN_PERCENT_LESS = 0.9
_WORDS = 500
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The model that ``seed`` names, plain (None) or in a session; in a group of the budget."""

    seed: int
    budget_bytes: int | None
    steps: int


@dataclass(frozen=True, slots=True)
class SurvivalJob:
    """``runs`` models; budgets between these shares of plain's peak above the floor."""

    runs: int = 50
    steps: int = 4
    least_share: float = 0.1
    most_share: float = 1.1
    seed: int = 0


def quick_job() -> SurvivalJob:
    """Five runs instead of fifty."""
    return SurvivalJob(runs=5, steps=2)


def run(
    job: SurvivalJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends; about ten seconds a run.

    Where no memory cgroup can be made, there are no rows but the reason.
    """
    works, reason = cgroup.can_limit()
    if not works:
        return BenchResult("survival", [{"part": "skipped", "reason": reason}], {}, (reason,))
    log = RowLog(rows_file, asdict(job))
    shares = np.random.default_rng(job.seed).uniform(job.least_share, job.most_share, job.runs)
    for place, share in enumerate(shares.tolist()):
        seed = job.seed + place
        on_progress(f"run {place + 1}", place, job.runs)
        log.row(str(seed), partial(one_run, seed, share, job.steps))
    notes = (
        f"{job.runs} runs of {job.steps} steps, budgets between {100 * job.least_share:.0f} and "
        f"{100 * job.most_share:.0f} % of plain's peak above the floor, swap off",
        "10 % less: of the least budget's part above what the process held beside mapped files, of "
        "which the system takes and returns some at any time",
    )
    return BenchResult("survival", log.rows, figures_of(log.rows), notes)


def one_run(seed: int, share: float, steps: int) -> Row:
    """Plain for the scale, then within the budget, then what a refusal claims."""
    drawn = draw(seed)
    plain = attempted(Attempt(seed, None, steps))
    floor, peak = plain["floor_bytes"], plain["peak_bytes"]
    budget = int(floor + share * (peak - floor))
    events = draw_events(seed, steps)
    row = {"part": "run", **described(drawn), "share": share, "plain_peak_bytes": peak}
    row |= {"moves": len(events.moves), "releases": events.releases}
    row |= {"budget_bytes": budget, **attempted(Attempt(seed, budget, steps))}
    least = row.get("least_bytes")
    if row["outcome"] == "refused" and least is not None:
        less = int(row["own_bytes"] + TEN_PERCENT_LESS * (least - row["own_bytes"]))
        row["at_least"] = attempted(Attempt(seed, least, steps))
        row["at_less"] = attempted(Attempt(seed, less, steps))
    return row


def attempted(asked: Attempt) -> Row:
    """One attempt in its own process, and in a group if it has a budget; how it ended."""
    module = "daf_bench.memory.survival_process"
    command = [sys.executable, "-m", module, json.dumps(asdict(asked))]
    cgroup.drop_page_cache()
    if asked.budget_bytes is None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return _ended(done, None)
    with cgroup.limited_group(asked.budget_bytes) as group:
        return _ended(group.run(command), asked.budget_bytes)


def _ended(done: subprocess.CompletedProcess[str], budget_bytes: int | None) -> Row:
    if done.returncode == cgroup.KILLED_BY_SYSTEM:
        return {"outcome": "killed"}
    if done.returncode < 0:
        return {"outcome": "crashed", "signal": -done.returncode}
    if done.returncode != 0:
        words = done.stderr.strip()[-_WORDS:]
        return {"outcome": "failed", "exit_code": done.returncode, "words": words}
    row: Row = json.loads(done.stdout)
    if budget_bytes is not None and "peak_bytes" in row:
        above = max(row["above_bytes"], row["peak_bytes"] - budget_bytes)
        row["above_bytes"] = max(0, above)
    return row


def figures_of(rows: list[Row]) -> dict[str, float]:
    """Counts; what happens at 10 % less is only asked whether it finishes within."""
    runs = [row for row in rows if row["part"] == "run"]
    claims = [row["at_least"] for row in runs if "at_least" in row]
    both = runs + claims
    less = [row["at_less"] for row in runs if "at_less" in row]

    def count(outcome: str, among: list[Row]) -> int:
        return sum(row["outcome"] == outcome for row in among)

    return {
        "runs": len(runs),
        "finished": count("finished", runs),
        "refused": count("refused", runs),
        "killed": count("killed", both),
        "crashed": count("crashed", both),
        "above": sum(row.get("above_bytes", 0) > 0 for row in both),
        "raised_or_failed": count("raised", both) + count("failed", both),
        "refused_wrongly": sum(map(is_refused_wrongly, runs)),
        "least_failed": sum(not _worked(row) for row in claims),
        "less_worked_share": sum(map(_worked, less)) / max(1, len(less)),
        "bursts_tried": sum(row.get("bursts", 0) for row in both),
        "bursts_refused": sum(row.get("bursts_refused", 0) for row in both),
        "steps_refused": sum(row.get("steps_refused", 0) for row in both),
        "moved": sum(row.get("moves", 0) > 0 for row in runs),
        "released": sum(row.get("releases", False) for row in runs),
    }


def is_refused_wrongly(row: Row) -> bool:
    """Whether a refusal's claim is untrue: no least budget, or none above the one refused, or one
    that does not work.
    """
    if row["outcome"] != "refused":
        return False
    least: Any = row["least_bytes"]
    if least is None or least <= row["budget_bytes"]:
        return True
    return not _worked(row["at_least"])


def _worked(row: Row) -> bool:
    return row["outcome"] == "finished" and not row["above_bytes"]
