"""Exact recomputation beside what a user would take instead, each stepped in turn with plain.

Rivals: checkpointed blocks at several shares of them (SGC), replay of whole modules as 0.1.0 had it
(``policy="checkpoint-static"``), and torch.compile with a budget for activations where it compiles.
Ours are sessions of the whole batch with nothing lossy, at several budgets and at the least that
they name. Whoever computes again holds what that takes: it counts as saved (torch.compile's cannot
be seen, and is left out of the bytes).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

from daf_bench.peers import run as peers
from daf_bench.peers.table import LEAST, PLAIN, PUBLISHED, Asked, by_peer
from daf_bench.peers.verdicts import OURS, Row, Rows, ran, workloads_of
from daf_bench.sweep.strategies import near_end_of_ratio
from daf_bench.workloads.sources import Sources

MOST_STEP = 1.40  # of plain's: no rival that is slower is compared by bytes
REFUSED = 9.9  # a budget that a rival holds and ours does not
BUDGETS = (75, 50, 35, 20)  # percent of plain's peak above the floor
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the blocks
STEPS = 6
NOTES = (
    "rivals and exact sessions: whole steps of the whole batch, each in turn with plain's; peaks "
    "are the process's, saved bytes those held for backward, with what is computed again",
    "fewer_bytes_*: a rival's saved bytes (of those whose step is at most "
    f"{MOST_STEP} of plain's) over the least of ours that is not slower than it",
    "exact, least: what a session names that has no room at all, then what it names there; one "
    "with some room measures more, and may name less",
    "vs_best_recompute_*: our step over that of the fastest rival within the same budget",
)


def _ours(percent: int) -> Asked:
    return Asked(f"exact, {percent} %", OURS, {"tolerance": 0.0, "cuts": False}, percent)


CONTESTANTS = (
    *(by_peer(f"checkpointing {share:.0%} of blocks", "checkpoint", share) for share in SHARES),
    Asked("replay of modules", PUBLISHED, {"policy": "checkpoint-static", "cuts": False}, 100),
    *map(_ours, BUDGETS),
    replace(_ours(LEAST), label="exact, least"),
    by_peer("activation budget 0.5", "activation-budget", 0.5, compiles=True),
)


def measure(
    workloads: tuple[str, ...], sources: Sources, rows_file: Path | None, report: peers.Report
) -> list[Row]:
    """Rows of every contestant, and plain's; going on where ``rows_file`` ends."""
    job = peers.PeersJob(
        *(workloads, CONTESTANTS), steps=STEPS, step_counts=(), has_duels=False, sources=sources
    )
    return peers.run(job, rows_file, report).rows


def figures_of(rows: Rows) -> dict[str, float]:
    """``fewer_bytes_worst`` and ``vs_best_recompute_worst``; what was not compared has none.

    The first is a rival's saved bytes over the least of ours that is not slower than that rival
    (the 95 % interval of the two steps' ratio reaches 1; plain counts as ours). The second is our
    step over that of the fastest rival whose peak is within the same budget (near end).
    """
    found = list(workloads_of(rows).values())
    fewer = [_fewer_bytes(each, own) for own in found for each in _rivals(own) if _is_fast(each)]
    steps = [ratio for own in found for percent in BUDGETS for ratio in _beside_best(own, percent)]
    figures: dict[str, float] = {"rivals": len(fewer), "rival_budgets": len(steps)}
    if fewer:
        figures["fewer_bytes_worst"] = min(fewer)
        figures["fewer_bytes_median"] = statistics.median(fewer)
    if steps:
        figures["vs_best_recompute_worst"] = max(steps)
        figures["vs_best_recompute_median"] = statistics.median(steps)
    return figures


def _rivals(own: Rows) -> list[Row]:
    done = ran(own)
    return [row for row in done if row["kind"] != OURS and row["contestant"] != PLAIN]


def _is_fast(rival: Row) -> bool:
    return rival["saved_bytes_peak"] is not None and rival["step_ratio"] <= MOST_STEP


def _fewer_bytes(rival: Row, own: Rows) -> float:
    ours = [row for row in ran(own) if row["kind"] == OURS and _step_beside(row, rival) <= 1]
    plain = next(row for row in own if row["contestant"] == PLAIN)
    return float(rival["saved_bytes_peak"] / min(r["saved_bytes_peak"] for r in [plain, *ours]))


def _beside_best(own: Rows, percent: int) -> list[float]:
    """Our step over the best rival's within that budget; nothing where no rival is within it."""
    asked = (row for row in own if row["kind"] == OURS and row["percent"] == percent)
    ours = next(asked, None)
    if ours is None:  # plain itself could not run, so nobody was asked
        return []
    within = [row for row in _rivals(own) if row["peak_bytes"] <= ours["budget_bytes"]]
    if not within:
        return []
    if "step_ratio" not in ours:
        return [REFUSED]
    return [_step_beside(ours, min(within, key=lambda row: float(row["step_ratio"])))]


def _step_beside(ours: Row, rival: Row) -> float:
    """Ours ÷ the rival's, the interval's end that is nearer to 1: each was in turn with plain."""
    return near_end_of_ratio(_log_ratios(ours), _log_ratios(rival))


def _log_ratios(row: Row) -> list[float]:
    pairs = zip(row["steps_ms"], row["plain_steps_ms"], strict=True)
    return [math.log(own / plain) for own, plain in pairs]
