"""The pressed run is really pressed, nothing is lost, and its figures follow from what was seen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daf_bench.harness import cgroup
from daf_bench.memory import pressure
from daf_bench.memory.pressure import (
    standard_error,
    steps_above_steady_budget,
    steps_to_restore,
    thinned,
    within_budget_ms,
)
from daf_bench.memory.pressure_plot import budget_corners, draw_pressure
from PIL import Image

# Twice the rate that the full benchmark states; what is left does not hold the plain step.
TINY = replace(
    pressure.quick_job(), steps=2, threads=1, rate_bytes_per_s=100e6, squeezed_fraction=0.65
)


WAYS = [
    pytest.param(name, marks=pytest.mark.thorough)
    for name in ("as the machine allows", "simulated")
]


@pytest.fixture(scope="module", params=WAYS)
def result(request: pytest.FixtureRequest) -> Any:
    wanted = request.param != "simulated"
    found = pressure.run(replace(TINY, may_use_cgroup=wanted))
    assert found.figures["in_cgroup"] == int(wanted and cgroup.can_limit()[0])
    return found


def of(result: Any, part: str) -> list[dict[str, Any]]:
    return [row for row in result.rows if row["part"] == part]


def test_nothing_is_killed_or_lost_and_the_budget_moved(result: Any) -> None:
    figures, steps = result.figures, of(result, "step")
    assert figures["kills"] == figures["lost_steps"] == figures["steps_above_full_budget"] == 0
    assert figures["steps"] == len(steps) >= 5 * TINY.steps
    phases = list(dict.fromkeys(step["phase"] for step in steps))
    assert phases == ["full", "halved", "restored", "squeezing", "squeezed", "released"]
    assert [row["budget_bytes"] for row in of(result, "budget")][:3] == [
        steps[0]["budget_bytes"],
        steps[2]["asked_bytes"],
        steps[0]["budget_bytes"],
    ]
    halved = [step for step in steps if step["phase"] == "halved"]
    assert halved[0]["budget_bytes"] == halved[0]["asked_bytes"] < steps[0]["budget_bytes"]
    assert halved[1]["peak_bytes"] <= halved[1]["budget_bytes"]
    assert halved[1]["policy"] != steps[1]["policy"]
    restored = [step for step in steps if step["phase"] == "restored"]
    assert restored[-1]["policy"] == steps[1]["policy"]
    assert math.isfinite(figures["within_budget_ms"])
    assert figures["loss_ratio"] == pytest.approx(1, abs=0.5)


def test_the_second_process_or_its_simulation_is_said(result: Any) -> None:
    (squeeze,) = of(result, "squeeze")
    assert squeeze["start_s"] < squeeze["full_s"] < squeeze["end_s"]
    assert result.figures["in_cgroup"] == int(not squeeze["simulated"])
    assert squeeze["simulated"] == any("SIMULATED" in note for note in result.notes)
    squeezed = [step for step in of(result, "step") if step["phase"] == "squeezed"]
    full = of(result, "step")[0]["budget_bytes"]
    wanted = 1 - TINY.squeezed_fraction
    assert result.figures["squeezed_to"] == pytest.approx(wanted, abs=0.15)
    assert squeezed[-1]["policy"] != of(result, "step")[1]["policy"]
    if squeeze["simulated"]:
        assert {step["budget_bytes"] for step in squeezed} == {full - squeeze["bytes"]}


def test_the_picture_shows_all_three(result: Any, tmp_path: Path) -> None:
    draw_pressure(result.rows, tmp_path / "pressure.png")
    pixels = np.asarray(Image.open(tmp_path / "pressure.png").convert("RGB")).astype(int)
    for colour in ((0x2A, 0x78, 0xB8), (0xC0, 0x39, 0x2B), (0xD9, 0x8C, 0x1F), (0x58, 0x81, 0x57)):
        assert (abs(pixels - np.array(colour)).sum(axis=-1) < 12).sum() > 100


def test_thinning_keeps_the_extremes_in_order() -> None:
    sizes = (5, 9, 1, 7, 3, 4)
    samples = [(10.01 + place * 0.02, size) for place, size in enumerate(sizes)]
    assert thinned(samples) == [samples[1], samples[2], samples[5]]
    assert thinned([]) == []


def test_time_within_the_budget_is_when_memory_was_last_seen_above() -> None:
    step = {"asked_s": 10.0, "asked_bytes": 100, "end_s": 11.0}
    early = [(9.9, 500), (10.0, 150), (10.02, 120), (10.04, 99), (10.5, 80), (12.0, 300)]
    assert within_budget_ms(step, early) == pytest.approx(20)
    assert within_budget_ms(step, [(10.0, 100), (10.5, 90)]) == 0
    assert within_budget_ms(step, [(10.0, 150), (11.005, 150)]) == math.inf


def test_steps_to_restore_counts_the_slow_ones() -> None:
    def steps(*restored: float) -> list[dict[str, Any]]:
        full = [{"phase": "full", "step_ms": ms} for ms in (100, 90, 200)]
        return full + [{"phase": "restored", "step_ms": ms} for ms in restored]

    assert steps_to_restore(steps(105, 300)) == 0
    assert steps_to_restore(steps(300, 130, 109)) == 2
    assert steps_to_restore(steps(300, 130)) == 2


def test_a_step_is_above_a_budget_only_if_that_was_known_before_it() -> None:
    sizes = ((90, 100), (95, 50), (60, 50), (40, 50), (70, 50), (90, 100))
    steps = [{"peak_bytes": peak, "budget_bytes": budget} for peak, budget in sizes]
    assert steps_above_steady_budget(steps) == 2


def test_noise_is_the_standard_error_of_the_mean() -> None:
    assert standard_error([1.0, 3.0]) == pytest.approx(1)
    assert standard_error([1.0]) == 0


def test_the_budget_is_drawn_as_steps() -> None:
    changes = ((5.0, 700), (12.0, 300), (14.0, None), (16.0, 700))
    rows = [
        {"part": "budget", "at_s": at, "budget_bytes": size and size * 10**6}
        for at, size in changes
    ]
    assert budget_corners(rows, start_s=10.0, end_s=20.0) == (
        [0.0, 2.0, 2.0, 6.0, 6.0, 10.0],
        [700, 700, 300, 300, 700, 700],
    )
    assert budget_corners([], start_s=10.0, end_s=20.0) == ([], [])
