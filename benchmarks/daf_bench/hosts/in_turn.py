"""A host's updates within a budget beside its own, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from daf_bench.harness.row_log import Row
from daf_bench.hosts.contestant import Contestant
from daf_bench.hosts.figures import MOST_WIDTH, interval_in
from daf_bench.hosts.setting import Setting

WARM_UP_UPDATES = 4
PLAIN, OURS = "plain", "ours"


def measure_in_turn(
    setting: Setting, pairs: int, most_pairs: int, report: Callable[[str], None]
) -> Row:
    """Return times of updates in pairs (ms) and both peaks, or ``refused``."""
    row: Row = {"budget_bytes": setting.budget_bytes}
    with ExitStack() as stack:
        children: dict[str, Contestant] = {}
        for label, budget in ((PLAIN, None), (OURS, setting.budget_bytes)):
            children[label] = Contestant(replace(setting, budget_bytes=budget))
            stack.callback(children[label].end)
        for index in range(WARM_UP_UPDATES):
            report(f"warms up, {index + 1} of {WARM_UP_UPDATES}")
            done = _one_round(children, index)
            if "raised" in done[OURS]:
                return {**row, "refused": done[OURS]["raised"]}
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
