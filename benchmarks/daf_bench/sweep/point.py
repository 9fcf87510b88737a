"""One point of the sweep: a contestant's prediction, peaks, times and first gradient."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daf_bench.harness.method_runner import Contender, Way
from daf_bench.harness.result import median_ratio
from daf_bench.harness.row_log import Row
from daf_bench.harness.subprocess_channel import ContestantError

# The first step runs under the tightest plan, and the second under one that is new.
WARM_UP_STEPS = 2
_GRADIENT_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class By:
    """What a contestant is measured by: plain stepped in turn (or None), and plain's gradient."""

    plain: Contender | None
    plain_gradient: Path
    gradient: Path


def measure_plain(plain: Contender, steps: int) -> Row:
    """Floor, peak and times of plain PyTorch, which has done one step already."""
    floor = plain.prepare()["floor_bytes"]
    done = [plain.step() for _ in range(steps)]
    return {
        "floor_bytes": floor,
        "peak_bytes": max(step["peak_bytes"] for step in done),
        "step_ms": statistics.median(step["step_ms"] for step in done),
        "steps_ms": [step["step_ms"] for step in done],
        "losses": [step["loss"] for step in done],
    }


def measure_point(way: Way, steps: int, by: By) -> Row:
    """Train ``steps`` steps this way; ``outcome`` is trained, refused, raised or died."""
    child = Contender(way)
    prepared: Row = {}
    try:
        prepared = child.prepare()
        if "refusal" in prepared:
            return {"outcome": "refused", **prepared}
        ours, theirs = _interleaved(child, by.plain, steps)
        last = ours[-1]
        if "raised" in last:
            return {"outcome": "raised", **prepared, "message": last["raised"]}
        facts = child.facts()
    except ContestantError as error:
        return {"outcome": "died", **prepared, "message": str(error)}
    finally:
        child.end()
    row = {"outcome": "trained", **prepared, **facts, **_steps_row(ours, theirs)}
    if way.budget_bytes is not None:
        row |= _against_budget(row, way.budget_bytes)
    return row | {"gradient_error": gradient_error(by.gradient, by.plain_gradient)}


def _interleaved(
    child: Contender, plain: Contender | None, steps: int
) -> tuple[list[Row], list[Row]]:
    """Both sides' steps in turn, the order alternating; ours end early when one raises."""
    ours: list[Row] = []
    theirs: list[Row] = []
    for index in range(steps):
        if plain is not None and index % 2:
            theirs.append(plain.step())
        ours.append(child.step())
        if "raised" in ours[-1]:
            break
        if plain is not None and not index % 2:
            theirs.append(plain.step())
    return ours, theirs


def _steps_row(ours: list[Row], theirs: list[Row]) -> dict[str, Any]:
    skip = min(WARM_UP_STEPS, len(ours) - 1)
    times, plain_times = ([step["step_ms"] for step in side] for side in (ours, theirs))
    row = {
        "peak_bytes": max(step["peak_bytes"] for step in ours),
        "step_ms": median_ms(times),
        "steps_ms": times,
        "losses": [step["loss"] for step in ours],
    }
    if theirs:
        row["step_ratio"] = median_ratio(times[skip:], plain_times[skip:])
        row["plain_steps_ms"] = plain_times
    return row


def _against_budget(row: Row, budget_bytes: int) -> dict[str, Any]:
    peak, floor = row["peak_bytes"], row["floor_bytes"]
    whole_peak = max(peak, row["session_peak_bytes"])
    return {
        "whole_peak_bytes": whole_peak,
        "overshoot_bytes": max(0, whole_peak - budget_bytes),
        "prediction_error": abs(row["predicted_peak_bytes"] - peak) / (peak - floor),
    }


def median_ms(times: list[float]) -> float:
    """The median without the first steps."""
    return statistics.median(times[min(WARM_UP_STEPS, len(times) - 1) :])


def gradient_error(ours: Path, plain: Path, scale: float = 1.0) -> float | None:
    """|ours · scale - plain| / |plain| over all parameters; None where one of them wrote none.

    Lossy codes and another order of random numbers (dropout in smaller pieces) show here.
    """
    if not ours.exists() or not plain.exists():
        return None
    first, second = (np.memmap(path, np.float32, "r") for path in (ours, plain))
    difference = total = 0.0
    for start in range(0, len(second), _GRADIENT_CHUNK):
        span = slice(start, start + _GRADIENT_CHUNK)
        one, other = scale * first[span].astype(np.float64), second[span].astype(np.float64)
        difference += float(np.square(one - other).sum())
        total += float(np.square(other).sum())
    return float(np.sqrt(difference / total)) if total else None
