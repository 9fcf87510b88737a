"""A host's updates within a budget beside its own, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from daf_bench.harness.row_log import Row
from daf_bench.hosts.contestant import Contestant
from daf_bench.hosts.figures import MOST_WIDTH, interval_in, share
from daf_bench.hosts.setting import Setting

WARM_UP_UPDATES = 4
PLAIN, OURS = "plain", "ours"


def measure_in_turn(
    setting: Setting, pairs: int, most_pairs: int, report: Callable[[str], None]
) -> Row:
    """Return times of updates in pairs (ms) and both peaks, or ``refused``.

    The budget is that of the host's peak in its first updates.
    """
    with ExitStack() as stack:
        children = {PLAIN: Contestant(setting)}
        stack.callback(children[PLAIN].end)
        _warm_up(children[PLAIN], "alone", report)
        known = children[PLAIN].facts()
        budget_bytes = share(known["floor_bytes"], known["peak_bytes"])
        row: Row = {"budget_bytes": budget_bytes}
        children[OURS] = Contestant(replace(setting, budget_bytes=budget_bytes))
        stack.callback(children[OURS].end)
        refusal = _warm_up(children[OURS], "within a budget", report)
        if refusal is not None:
            return {**row, "refused": refusal}
        row["ms"] = {label: [] for label in children}
        while _wants_more(row, pairs, most_pairs):
            count = len(row["ms"][OURS])
            report(f"pair {count + 1} of {pairs} or more")
            done = _one_round(children, count)
            if "raised" in done[OURS]:
                return {**row, "refused": done[OURS]["raised"]}
            for label in children:
                row["ms"][label].append(done[label]["ms"])
        return row | _peaks(children)


def _warm_up(child: Contestant, what: str, report: Callable[[str], None]) -> str | None:
    """Run the updates in which libraries load and sessions measure; return a refusal."""
    for index in range(WARM_UP_UPDATES):
        report(f"{what}, warms up, {index + 1} of {WARM_UP_UPDATES}")
        done = child.update()
        if "raised" in done:
            return str(done["raised"])
    return None


def _one_round(children: dict[str, Contestant], index: int) -> dict[str, dict[str, Any]]:
    """One update of each, the order alternating."""
    order = list(children) if index % 2 == 0 else [*reversed(children)]
    return {label: children[label].update() for label in order}


def _wants_more(row: Row, pairs: int, most_pairs: int) -> bool:
    count = len(row["ms"][OURS])
    if count < pairs:
        return True
    return count < most_pairs and interval_in(row).half_width > MOST_WIDTH


def _peaks(children: dict[str, Contestant]) -> Row:
    plain, ours = children[PLAIN].facts(), children[OURS].facts()
    return {
        "floor_bytes": plain["floor_bytes"],
        "plain_peak_bytes": plain["peak_bytes"],
        "peak_bytes": ours["peak_bytes"],
        "sessions": ours["sessions"],
        "micro_batches": ours["micro_batches"],
        "reasons": ours["reasons"],
    }
