"""The side-by-side's named numbers, from its rows alone."""

from __future__ import annotations

import statistics

from daf_bench.peers.table import BASELINE, BASELINE_BITS, COMPARED_PERCENT, DAF_AT, DAF_BITS
from daf_bench.peers.verdicts import Duels, Row, Rows, best_peer, duels_of, ran, workloads_of


def figures_of(rows: Rows) -> dict[str, float]:
    """For every workload DAF within half of plain's peak, beside the best peer within the same.

    ``daf_vs_best_peer_step_ratio`` is DAF's step ÷ that peer's, the two stepped in turn with each
    other. ``speed_vs_minmax_baseline`` is how many times as fast as the published code and
    allocation DAF is at the same width, whole steps compared: of the two in turn where they were
    run so, else of their ratios to plain's; without a workload's name, the workloads' median.
    """
    duels = duels_of(rows)
    figures: dict[str, float] = {}
    speeds = []
    for name, own in workloads_of(rows).items():
        done = ran(own)
        figures |= {f"{name}_{key}": value for key, value in _at_one_budget(done, duels).items()}
        speed = _speed_vs_baseline(done, duels)
        if speed is not None:
            figures[f"{name}_speed_vs_minmax_baseline"] = speed
            speeds.append(speed)
    if speeds:
        figures["speed_vs_minmax_baseline"] = statistics.median(speeds)
    return figures


def _at_one_budget(done: Rows, duels: Duels) -> dict[str, float]:
    ours = _called(done, DAF_AT.format(COMPARED_PERCENT))
    best = best_peer(done, COMPARED_PERCENT / 100)
    if ours is None or best is None:
        return {}
    beside = duels.get((ours["workload"], ours["contestant"], best["contestant"]))
    return {
        "daf_peak_ratio": ours["peak_ratio"],
        "daf_step_ratio": ours["step_ratio"],
        "best_peer_peak_ratio": best["peak_ratio"],
        "best_peer_step_ratio": best["step_ratio"],
        **({} if beside is None else {"daf_vs_best_peer_step_ratio": beside}),
    }


def _speed_vs_baseline(done: Rows, duels: Duels) -> float | None:
    theirs, ours = _called(done, BASELINE), _called(done, DAF_BITS.format(BASELINE_BITS))
    if theirs is None or ours is None:
        return None
    beside = duels.get((ours["workload"], ours["contestant"], BASELINE))
    return float(theirs["step_ratio"] / ours["step_ratio"]) if beside is None else 1 / beside


def _called(done: Rows, label: str) -> Row | None:
    return next((row for row in done if row["contestant"] == label), None)
