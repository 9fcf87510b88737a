"""``daf bench values``: what its figures say of rows, and a small run."""

from __future__ import annotations

from typing import Any

import pytest
from daf_bench.peers.table import PEER, PLAIN
from daf_bench.peers.verdicts import OURS
from daf_bench.values import rivals, run

PLAIN_MS = (100.0, 101.0, 99.0, 100.0, 102.0, 98.0)


def row(name: str, kind: str, ratio: float, saved: int, **more: Any) -> dict[str, Any]:
    found = {"workload": "w1", "contestant": name, "kind": kind, "percent": None}
    times = {"steps_ms": [ratio * ms for ms in PLAIN_MS], "plain_steps_ms": list(PLAIN_MS)}
    bytes_of = {"saved_bytes_peak": saved, "peak_bytes": saved, "budget_bytes": None}
    return found | times | bytes_of | {"step_ratio": ratio} | more


def ours(percent: int, ratio: float, saved: int) -> dict[str, Any]:
    return row(
        f"exact, {percent} %", OURS, ratio, saved, percent=percent, budget_bytes=10 * percent
    )


def refused(percent: int) -> dict[str, Any]:
    found = row(f"exact, {percent} %", OURS, 1.0, 0, percent=percent, budget_bytes=10 * percent)
    return {key: value for key, value in found.items() if key != "step_ratio"}


def test_a_rival_is_compared_with_the_least_bytes_of_ours_that_are_as_fast() -> None:
    rows = [
        row(PLAIN, PEER, 1.0, 1000),
        row("half", PEER, 1.2, 600),
        row("all", PEER, 1.5, 100),  # too slow to be compared by bytes
        *(ours(75, 1.1, 400), ours(50, 1.3, 300), refused(35), refused(20)),
    ]
    figures = rivals.figures_of(rows)
    assert figures["rivals"] == 1
    assert figures["fewer_bytes_worst"] == pytest.approx(600 / 400)


def test_plain_counts_as_ours_where_everything_of_ours_is_slower() -> None:
    rows = [row(PLAIN, PEER, 1.0, 1000), row("half", PEER, 1.05, 600)]
    rows += [ours(75, 1.1, 400), refused(50), refused(35), refused(20)]
    assert rivals.figures_of(rows)["fewer_bytes_worst"] == pytest.approx(0.6)


def test_within_a_budget_the_fastest_rival_counts_and_a_refusal_is_the_worst() -> None:
    rows = [
        row(PLAIN, PEER, 1.0, 1000),
        row("half", PEER, 1.2, 600),
        row("all", PEER, 1.4, 350),
        *(ours(75, 1.3, 400), ours(50, 1.3, 300), refused(35), refused(20)),
    ]
    figures = rivals.figures_of(rows)
    assert figures["rival_budgets"] == 3  # nobody is within 20 %
    assert figures["vs_best_recompute_worst"] == rivals.REFUSED
    assert figures["vs_best_recompute_median"] == pytest.approx(1.3 / 1.2)  # at 50 %: 1.3 / 1.4


def test_a_workload_whose_plain_side_cannot_run_is_not_compared() -> None:
    failed = {"workload": "w4", "contestant": PLAIN, "kind": PEER, "percent": None}
    figures = rivals.figures_of([failed | {"failed": "no library"}])
    assert figures == {"rivals": 0, "rival_budgets": 0}


def test_what_differs_by_less_than_its_noise_is_no_slower() -> None:
    rival, own = row("half", PEER, 1.2, 600), ours(75, 1.2, 400)
    own["steps_ms"] = [1.2 * ms * each for ms, each in zip(PLAIN_MS, (1.1, 0.95) * 3, strict=True)]
    rows = [row(PLAIN, PEER, 1.0, 1000), rival, own, refused(50), refused(35), refused(20)]
    figures = rivals.figures_of(rows)
    assert figures["vs_best_recompute_worst"] == 1.0
    assert figures["fewer_bytes_worst"] == pytest.approx(1.5)


def test_a_small_run_recomputes_exactly_and_tells_what_recording_takes() -> None:
    job = run.ValuesJob(("w2c",), pairs=6, most_pairs=6, is_small=True, has_rivals=False)
    figures = run.run(job).figures
    assert figures["compared"] == 1
    assert figures["mismatches"] == 0
    assert figures["recording_share_worst"] > 0.0
    assert figures["unused_recorders"] == 0
    assert figures["mobilenet_v2_step"] > 0.5
