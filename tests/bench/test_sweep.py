"""The sweep measures what it says, its figures follow from its rows, and it goes on when rerun."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daf_bench.harness.row_log import RowLog
from daf_bench.sweep.figures import figures_of
from daf_bench.sweep.plot import curve, draw_sweep, drawn_workloads
from daf_bench.sweep.point import gradient_error
from daf_bench.sweep.run import SweepJob, measured_by, run
from daf_bench.workloads.sources import Sources
from PIL import Image

from daf.core.errors import RunFolderError

TINY = SweepJob(
    workloads=("w2c",),
    timed=("w2c",),
    percents=(400, 1),
    steps=3,
    by_hand=((1.0, 1),),
    is_small=True,
    sources=Sources(None),
)
MB = 10**6


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    file = tmp_path_factory.mktemp("sweep") / "rows.jsonl"
    return run(TINY, file), file


def by_point(result: Any) -> dict[str, dict[str, Any]]:
    return {row["point"]: row for row in result.rows}


@pytest.mark.thorough
def test_every_point_is_measured_beside_plain(measured: Any) -> None:
    rows = by_point(measured[0])
    plain, ours = rows["plain"], rows["optimal, 400 %"]
    above = plain["peak_bytes"] - plain["floor_bytes"]
    assert above > 0
    assert ours["budget_bytes"] == plain["floor_bytes"] + 4 * above
    assert ours["outcome"] == "trained"
    assert ours["floor_bytes"] < ours["peak_bytes"] <= ours["whole_peak_bytes"]
    assert ours["overshoot_bytes"] == 0
    wrong = abs(ours["predicted_peak_bytes"] - ours["peak_bytes"])
    held = ours["peak_bytes"] - ours["floor_bytes"]
    assert ours["prediction_error"] == pytest.approx(wrong / held)
    assert len(ours["steps_ms"]) == len(ours["plain_steps_ms"]) == TINY.steps
    assert sum(ours["methods"].values()) > 0
    # Plain's first step came before those that are timed.
    assert rows["by hand: checkpoint 100 % of blocks"]["gradient_error"] == 0.0
    assert rows["by hand: checkpoint 100 % of blocks"]["losses"][1] == plain["losses"][0]


@pytest.mark.thorough
def test_a_refusal_is_tried_at_its_least_and_below(measured: Any) -> None:
    rows = by_point(measured[0])
    refused = rows["optimal, 1 %"]
    assert refused["outcome"] == "refused"
    assert refused["least_bytes"] > refused["budget_bytes"]
    assert rows["optimal, least"]["budget_bytes"] == refused["least_bytes"]
    part = refused["least_bytes"] - refused["floor_bytes"]
    less = rows["optimal, 10 % less"]["budget_bytes"]
    assert less == pytest.approx(refused["floor_bytes"] + 0.9 * part, abs=1)
    assert figures_of(measured[0].rows)["points"] == 4


@pytest.mark.thorough
def test_it_goes_on_where_it_stopped_without_measuring_again(measured: Any) -> None:
    result, file = measured
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n")
    again = run(TINY, file)
    assert by_point(again).keys() == by_point(result).keys()
    assert again.rows[:-1] == result.rows[:-1]
    reports: list[str] = []
    assert run(TINY, file, lambda what, *_: reports.append(what)).rows == again.rows
    assert reports


@pytest.mark.thorough
def test_the_picture_shows_plain_daf_and_strategies_by_hand(measured: Any, tmp_path: Path) -> None:
    draw_sweep(measured[0].rows, tmp_path / "sweep.png")
    pixels = np.asarray(Image.open(tmp_path / "sweep.png").convert("RGB")).astype(int)
    for colour in ((0x2A, 0x78, 0xB8), (0x22, 0x30, 0x3C), (0x8A, 0x97, 0xA3)):
        assert (abs(pixels - np.array(colour)).sum(axis=-1) < 12).sum() > 30


def budget(asked: str, outcome: str = "trained", **changes: Any) -> dict[str, Any]:
    percent = int(asked[:-2]) if asked[0] != "l" and asked != "10 % less" else None
    row = {"part": "budget", "workload": "w1", "policy": "optimal", "percent": percent}
    row |= {"asked": asked, "outcome": outcome, "budget_bytes": 900 * MB, "floor_bytes": 300 * MB}
    if outcome == "trained":
        row |= {"peak_bytes": 800 * MB, "overshoot_bytes": 0, "prediction_error": 0.02}
        row |= {"step_ratio": 1.1}
    if outcome == "refused":
        row |= {"least_bytes": 950 * MB}
    return row | changes


def static(strategy: str, ratio: float, peak_bytes: int, workload: str = "w1") -> dict[str, Any]:
    row = {"part": "static", "workload": workload, "strategy": strategy, "outcome": "trained"}
    return row | {"step_ratio": ratio, "peak_bytes": peak_bytes, "floor_bytes": 300 * MB}


def test_figures_count_overshoots_and_errors() -> None:
    rows = [
        budget("100 %", prediction_error=0.01),
        budget("75 %", prediction_error=0.09, overshoot_bytes=1),
        budget("50 %", prediction_error=0.03, step_ratio=1.04),
        budget("25 %", "refused"),
        budget("least", step_ratio=1.25),
        budget("10 % less", "refused"),
        budget("50 %", policy="sage", overshoot_bytes=5),
    ]
    figures = figures_of(rows)
    assert figures["overshoots"] == 1
    assert figures["refusals_of_feasible"] == figures["least_too_high"] == 0
    assert figures["prediction_error_worst"] == 0.09
    assert figures["prediction_error_median"] == pytest.approx(0.025)
    assert figures["step_ratio_w1_50"] == 1.04
    assert figures["step_ratio_w1_25_or_least"] == 1.25


@pytest.mark.parametrize(
    "row",
    [
        budget("50 %", "refused"),
        budget("25 %", "refused", least_bytes=None),
        budget("25 %", "refused", least_bytes=890 * MB),
        budget("least", "refused"),
        budget("least", "raised"),
        budget("25 %", "died"),
    ],
)
def test_a_wrong_refusal_is_counted(row: dict[str, Any]) -> None:
    assert figures_of([row])["refusals_of_feasible"] == 1


def test_a_least_budget_that_is_not_the_least_is_counted() -> None:
    assert figures_of([budget("10 % less")])["least_too_high"] == 1
    assert figures_of([budget("10 % less", overshoot_bytes=1)])["least_too_high"] == 0
    assert figures_of([budget("10 % less", "raised")])["refusals_of_feasible"] == 0


def test_slower_than_by_hand_compares_only_what_is_no_higher_and_the_same() -> None:
    def slower(*statics: dict[str, Any]) -> tuple[float, float]:
        figures = figures_of([budget("50 %"), *statics])
        return figures["slower_than_static"], figures["slower_than_static_within_budget"]

    assert slower(static("checkpoint 50 % of blocks", 1.05, 800 * MB)) == (1, 1)
    assert slower(static("checkpoint 50 % of blocks", 1.2, 800 * MB)) == (0, 0)
    assert slower(static("checkpoint 50 % of blocks", 1.05, 850 * MB)) == (0, 1)
    assert slower(static("accumulate 2", 1.05, 700 * MB)) == (0, 0)  # batch statistics differ
    assert slower(static("checkpoint 50 % of blocks", 1.05, 700 * MB, "w3")) == (0, 0)


def test_a_curve_is_throughput_against_the_budget_above_the_floor() -> None:
    rows = [
        budget("100 %", step_ratio=1.0),
        budget("50 %", step_ratio=1.25, budget_bytes=600 * MB),
        budget("25 %", "refused"),
    ]
    assert curve(rows, "w1", "optimal") == [(300.0, 0.8), (600.0, 1.0)]
    unpaired = {k: v for k, v in budget("50 %").items() if k != "step_ratio"}
    assert drawn_workloads([*rows, unpaired | {"workload": "w2a"}]) == ["w1"]
    assert drawn_workloads([unpaired | {"workload": "w2a"}]) == ["w2a"]


def test_gradient_error_is_relative_to_plain(tmp_path: Path) -> None:
    plain, ours = np.array([3.0, 4.0], np.float32), np.array([3.0, 4.5], np.float32)
    plain.tofile(tmp_path / "plain")
    ours.tofile(tmp_path / "ours")
    assert gradient_error(tmp_path / "ours", tmp_path / "plain") == pytest.approx(0.1)
    assert gradient_error(tmp_path / "none", tmp_path / "plain") is None


def test_rows_of_another_job_are_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    RowLog(file, measured_by(TINY)).row("w2c: plain", lambda: {"part": "budget", "point": "plain"})
    with pytest.raises(RunFolderError, match="another measurement"):
        run(replace(TINY, steps=5), file)
