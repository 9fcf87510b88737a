"""The doors' benchmark trains through each and counts what must not be; intervals are exact."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from daf_bench.doors import run
from daf_bench.doors.fixed_cost import fixed_costs
from daf_bench.doors.interval import interval_of
from daf_bench.doors.loops import DOORS
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=60))
def test_an_interval_leaves_out_a_twentieth_at_most(values: list[float]) -> None:
    found = interval_of(values)
    assert found.low <= found.middle == median(values) <= found.high
    outside = sum(value < found.low for value in values)
    count = len(values)
    if len({*values}) == count:
        tail = sum(math.comb(count, k) for k in range(outside + 1)) / 2**count
        more = tail + math.comb(count, outside + 1) / 2**count
        assert 2 * tail <= 0.05 < 2 * more or 2 * outside + 2 >= count


def test_few_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="six at least"):
        interval_of([1.0] * 5)


def test_every_door_costs_something_on_a_small_network() -> None:
    found = fixed_costs(20)
    assert set(found) == set(DOORS)
    assert all(0 < cost < 1000 for cost in found.values())


@pytest.mark.thorough
def test_a_small_workload_through_every_door(tmp_path: Path) -> None:
    job = replace(run.DoorsJob(), workloads=("w6",), is_small=True, most_pairs=12, steps=20)
    result = run.run(job, tmp_path / "rows.jsonl")
    figures = result.figures
    assert figures["gradients_tried"] == len(DOORS)
    assert figures["mismatches"] == figures["failed"] == 0
    again = run.run(job, tmp_path / "rows.jsonl")
    assert again.rows == result.rows


def test_figures_take_near_ends_and_count_what_passes_the_budget() -> None:
    ms = {"step": [10.0] * 12, "backward": [10.2] * 11 + [99.0], "compress": [11.0] * 12}
    ms[run.AGAIN] = [10.0] * 12
    rows = [
        {"part": "in turn", "workload": "w1", "ms": ms, "refused": {}, "is_over": {"step": True}},
        {"part": "gradient", "workload": "w1", "gradient_error": 0.5, "is_over": False},
        {"part": "fixed", "step": 0.1, "backward": 0.4, "compress": 0.2},
    ]
    figures = run.figures_of(rows)
    assert figures["backward_over_step_worst"] == pytest.approx(1.02)
    assert figures["compress_over_step_worst"] == pytest.approx(1.1)
    assert figures["step_over_itself_worst"] == pytest.approx(1.0)
    assert figures["over_budget"] == 1
    assert figures["mismatches"] == 1
    assert figures["fixed_ms"] == 0.4
