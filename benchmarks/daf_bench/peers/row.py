"""One row of the side-by-side: a contestant stepped in turn with plain PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daf_bench.harness.method_runner import Contender, Way
from daf_bench.harness.result import median_ratio
from daf_bench.harness.row_log import Row
from daf_bench.harness.subprocess_channel import ContestantError, TooLateError
from daf_bench.sweep.point import gradient_error

# Compilers compile in the first step, sessions measure in it, and a new plan runs in the second.
LEAST_WARM_UP_STEPS = 2
# Sessions that are still trying plans go on until they have one, or so often.
MOST_WARM_UP_STEPS = 32


def warm_up_steps(steps: int) -> int:
    """How many come before those that are timed: half as many, while sessions search for plans."""
    return max(LEAST_WARM_UP_STEPS, steps // 2)


class Plain:
    """Plain PyTorch, running and warm; ``gradient`` is where its first gradient is written."""

    def __init__(self, child: Contender, gradient: Path) -> None:
        self.child = child
        self.gradient = gradient
        self.saved_bytes = child.settled_gradient(gradient)["saved_bytes_peak"]


def plain_row(child: Contender, steps: int) -> Row:
    """Plain PyTorch alone, as many steps as everybody makes."""
    floor = child.prepare()["floor_bytes"]
    done = [child.step() for _ in range(warm_up_steps(steps) + steps)]
    peak = max(step["peak_bytes"] for step in done)
    return {
        **_row_of(done, steps, child.facts(), (floor, peak)),
        "step_ratio": 1.0,
        "gradient_error": 0.0,
    }


def check_time(until_s: float | None, what: str) -> None:
    """Is there any time left to begin?

    Raises:
        TooLateError: there is none.
    """
    if until_s is not None and time.monotonic() >= until_s:
        raise TooLateError(f"no time is left for {what}")


def measure_beside(
    way: Way,
    running_plain: Callable[[], Plain],
    plain_row: Row,
    steps: int,
    folder: Path,
    until_s: float | None,
) -> Row:
    """One contestant in turn with plain; what it cannot do is told in its row.

    Raises:
        TooLateError: its time was up, ``until_s``.
    """
    check_time(until_s, f"{way.workload}, {way.peer}")
    plain = running_plain()
    child = Contender(way)
    child.until_s = until_s
    try:
        row = _measured(child, plain, plain_row, steps, folder)
    except TooLateError:
        raise
    except ContestantError as error:
        row = {"failed": str(error)}
    finally:
        child.end()
    return {"budget_bytes": way.budget_bytes, **row}


def _measured(child: Contender, plain: Plain, plain_row: Row, steps: int, folder: Path) -> Row:
    prepared = child.prepare()
    if "refusal" in prepared:
        return {"refused": prepared["refusal"], "least_bytes": prepared["least_bytes"]}
    ours, theirs = _interleaved(child, plain.child, steps)
    if "raised" in ours[-1]:
        return {"refused": ours[-1]["raised"], "least_bytes": None}
    row = _row_of(ours, steps, child.facts(), (plain_row["floor_bytes"], plain_row["peak_bytes"]))
    own, other = times(ours[-steps:]), times(theirs)
    row |= {"step_ratio": median_ratio(own, other), "steps_ms": own, "plain_steps_ms": other}
    # Settled: the plan that training goes on with, not that of the first, careful step.
    gradient = folder / "ours"
    gradient.unlink(missing_ok=True)
    counted = child.settled_gradient(gradient)
    row["gradient_error"] = gradient_error(gradient, plain.gradient)
    return row | counted


def _interleaved(
    child: Contender, plain: Contender, steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Warm-up steps alone, then both in turn; ended early by a refusal."""
    before = warmed_up(child, steps)
    if "raised" in before[-1]:
        return before, []
    ours, theirs = run_in_turn(child, plain, steps)
    return before + ours, theirs


def warmed_up(child: Contender, steps: int) -> list[dict[str, Any]]:
    """The steps that come before those that are timed; the last one tells if it was refused."""
    done: list[dict[str, Any]] = []
    while _is_warming(done, warm_up_steps(steps)):
        done.append(child.step())
    return done


def run_in_turn(
    one: Contender, other: Contender, steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``steps`` of each, the order alternating; the last pair is the one in which one refused."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    while len(pairs) < steps and not (pairs and any("raised" in done for done in pairs[-1])):
        if len(pairs) % 2:
            first = one.step()
            pairs.append((first, other.step()))
        else:
            second = other.step()
            pairs.append((one.step(), second))
    return [first for first, _ in pairs], [second for _, second in pairs]


def _is_warming(done: list[dict[str, Any]], least: int) -> bool:
    if len(done) < least:
        return not done or "raised" not in done[-1]
    return not done[-1].get("is_settled", True) and len(done) < MOST_WARM_UP_STEPS


def _row_of(
    done: list[dict[str, Any]], steps: int, facts: Row, floor_and_plain_peak: tuple[int, int]
) -> Row:
    floor, plain_peak = floor_and_plain_peak
    timed = done[-steps:]
    peak = max(*(step["peak_bytes"] for step in done), facts.get("session_peak_bytes", 0))
    steady = max(step["peak_bytes"] for step in timed)
    step_ms = statistics.median(times(timed))
    counted = done[: warm_up_steps(steps) + steps]  # as many as plain's, whoever warmed up longer
    return {
        "floor_bytes": floor,
        "peak_bytes": peak,
        "peak_ratio": (peak - floor) / (plain_peak - floor),
        "steady_peak_ratio": (steady - floor) / (plain_peak - floor),
        "predicted_peak_bytes": facts.get("predicted_peak_bytes"),
        "saved_bytes_plain": facts.get("saved_bytes_plain"),
        "saved_bytes_peak": facts["saved_bytes_peak"],
        "step_ms": step_ms,
        "examples_per_s": 1000 * facts["examples"] / step_ms,
        "loss": statistics.fmean(step["loss"] for step in counted[-max(1, steps // 2) :]),
    }


def times(done: list[dict[str, Any]]) -> list[float]:
    """Milliseconds of each step."""
    return [step["step_ms"] for step in done]
