"""Exact policies give plain PyTorch's gradients on every workload's model, dropout included."""

from __future__ import annotations

from typing import Any

import pytest
from daf_bench.exact_gradients import GradientsJob, run
from daf_bench.workloads import WORKLOADS
from daf_bench.workloads.sources import Sources

# Sums in another order, where the batch is cut into pieces.
REORDERED = 1e-5
SPLIT = ("w3", "w4")
PER_CHANGE = ("w1", "w3")  # convolutions, attention


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in PER_CHANGE else pytest.mark.thorough)
        for name in WORKLOADS
    ],
)
def rows(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    if request.param in SPLIT:
        pytest.importorskip("transformers")
    job = GradientsJob((request.param,), is_small=True, sources=Sources(None))
    return {row["policy"]: row for row in run(job).rows}


@pytest.mark.thorough
def test_replay_and_spill_equal_plain_bit_for_bit(rows: dict[str, dict[str, Any]]) -> None:
    for name in ("replay", "spill"):
        assert rows[name]["identical"]
        assert rows[name]["gradient_norm"] > 0
    assert rows["replay"]["replayed_inputs"] > 0
    assert rows["replay"]["saved_bytes"] < rows["replay"]["saved_bytes_plain"]
    assert rows["spill"]["spilled_bytes"] > 0.3 * rows["spill"]["saved_bytes_plain"]


def test_pieces_equal_the_same_pieces_and_the_whole_batch(rows: dict[str, dict[str, Any]]) -> None:
    workload = rows["replay"]["workload"]
    assert ("pieces" in rows) == (workload in SPLIT)
    for name in [name for name in rows if name.startswith("pieces")]:
        assert rows[name]["gradient_error"] < REORDERED
        assert rows[name]["micro_batch"] * 2 == rows["replay"]["micro_batch"]
