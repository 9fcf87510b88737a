"""The side-by-side's named numbers, from its rows alone."""

from __future__ import annotations

import statistics

from daf.bench.peers_table import BASELINE, BASELINE_BITS, DAF_AT, DAF_BITS
from daf.report.peers_words import Row, Rows, best_peer, ran, workloads_of

COMPARED_PERCENT = 50


def figures_of(rows: Rows) -> dict[str, float]:
    """For every workload DAF within half of plain's peak, beside the best peer within the same.

    ``speed_vs_minmax_baseline`` is how many times as fast as the published code and allocation
    DAF is at the same width, whole steps compared; without a workload's name, their median.
    """
    figures: dict[str, float] = {}
    speeds = []
    for name, own in workloads_of(rows).items():
        done = ran(own)
        figures |= {f"{name}_{key}": value for key, value in _at_one_budget(done).items()}
        speed = _speed_vs_baseline(done)
        if speed is not None:
            figures[f"{name}_speed_vs_minmax_baseline"] = speed
            speeds.append(speed)
    if speeds:
        figures["speed_vs_minmax_baseline"] = statistics.median(speeds)
    return figures


def _at_one_budget(done: Rows) -> dict[str, float]:
    ours = _called(done, DAF_AT.format(COMPARED_PERCENT))
    best = best_peer(done, COMPARED_PERCENT / 100)
    if ours is None or best is None:
        return {}
    return {
        "daf_peak_ratio": ours["peak_ratio"],
        "daf_step_ratio": ours["step_ratio"],
        "best_peer_peak_ratio": best["peak_ratio"],
        "best_peer_step_ratio": best["step_ratio"],
    }


def _speed_vs_baseline(done: Rows) -> float | None:
    theirs, ours = _called(done, BASELINE), _called(done, DAF_BITS.format(BASELINE_BITS))
    return float(theirs["step_ratio"] / ours["step_ratio"]) if theirs and ours else None


def _called(done: Rows, label: str) -> Row | None:
    return next((row for row in done if row["contestant"] == label), None)
