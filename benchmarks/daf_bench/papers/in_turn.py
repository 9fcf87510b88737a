"""Plain PyTorch, DAF as published and DAF's own plan, stepped in turn under one budget."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from daf_bench.harness.method_runner import Contender, Way
from daf_bench.harness.row_log import Row
from daf_bench.harness.subprocess_channel import ContestantError
from daf_bench.peers.row import MOST_WARM_UP_STEPS, warm_up_steps
from daf_bench.sweep.point import gradient_error

PLAIN, PUBLISHED, OURS = "plain", "daf", "optimal"
BUDGETED: Mapping[str, str | None] = MappingProxyType({PUBLISHED: "daf", OURS: None})
OF_STEPS = ("peak_bytes", "saved_bytes", "micro_batch")
Say = Callable[[str], None]


class Contestant:
    """One way in a process of its own, which takes part until it is refused or ends.

    ``ended`` says why it takes part no longer: ``refused`` by the budget, or ``failed``.
    """

    def __init__(self, label: str, way: Way) -> None:
        self.label = label
        self.way = way
        self.prepared: Row = {}
        self.done: list[Row] = []
        self.ended: Row = {}
        self._child = Contender(way)

    @property
    def takes_part(self) -> bool:
        """True if it still trains."""
        return not self.ended

    def prepare(self) -> None:
        """Measure the floor and make the first plan."""
        self.prepared = self._asked(self._child.prepare)
        if "refusal" in self.prepared:
            least = self.prepared.pop("least_bytes")
            self.ended = {"refused": self.prepared.pop("refusal"), "least_bytes": least}

    def warm_up(self, steps: int) -> None:
        """Train before what is timed; longer while a session still tries plans."""
        least = warm_up_steps(steps)
        while self.takes_part and self._is_warming(least):
            self.step()

    def step(self) -> None:
        """Train one batch; a late refusal ends the part that it takes."""
        found = self._asked(self._child.step)
        if "raised" in found:
            self.ended = {"refused": found["raised"], "least_bytes": None}
        elif found:
            self.done.append(found)

    def facts(self) -> Row:
        """Return what a session knows of itself."""
        return self._asked(self._child.facts) if self.takes_part else {}

    def gradient(self, path: Path) -> None:
        """Write the first batch's gradient at the first weights, by the plan of the end."""
        if self.takes_part:
            self._asked(lambda: self._child.settled_gradient(path))

    def end(self) -> None:
        """End the process."""
        self._child.end()

    def _is_warming(self, least: int) -> bool:
        if len(self.done) < least:
            return True
        return not self.done[-1].get("is_settled", True) and len(self.done) < MOST_WARM_UP_STEPS

    def _asked(self, ask: Callable[[], Row]) -> Row:
        try:
            return ask()
        except ContestantError as error:
            self.ended = {"failed": str(error)}
            return {}


def measured_in_turn(way: Way, percent: int, steps: int, say: Say) -> list[Row]:
    """Return a row for plain and each budgeted contestant of one workload.

    Args:
        way: the workload, of which the contestants are made.
        percent: the budget, floor + percent · (plain's peak - floor).
        steps: int, timed steps of each.
        say: receives what happens now.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        way = replace(way, keeps_first_state=True)

        def started(label: str, way: Way) -> Contestant:
            say(f"{label}, first steps")
            found = Contestant(label, way)
            stack.callback(found.end)
            found.prepare()
            found.warm_up(steps)
            return found

        plain = started(PLAIN, way)
        budget = _budget_bytes(plain, percent)
        if budget is None:
            reason = {"failed": f"plain did not train: {plain.ended}"}
            return [{"contestant": label, **reason} for label in (PLAIN, *BUDGETED)]
        own = [
            started(label, replace(way, budget_bytes=budget, policy=policy))
            for label, policy in BUDGETED.items()
        ]
        everybody = (plain, *own)
        pairs = _rounds(everybody, steps, say)
        say("gradients")
        facts = {each.label: each.facts() for each in everybody}
        files = {each.label: Path(folder) / each.label for each in everybody}
        for each in everybody:
            each.gradient(files[each.label])
        return [
            _row(each, everybody, pairs, facts[each.label])
            | {"gradient_error": gradient_error(files[each.label], files[PLAIN])}
            for each in everybody
        ]


def _budget_bytes(plain: Contestant, percent: int) -> int | None:
    if not plain.takes_part:
        return None
    floor, peak = plain.prepared["floor_bytes"], max(each["peak_bytes"] for each in plain.done)
    return int(floor + percent * (peak - floor) / 100)


def _rounds(everybody: Sequence[Contestant], steps: int, say: Say) -> list[dict[str, float]]:
    """Return each round's milliseconds by contestant; who begins changes from round to round."""
    rounds: list[dict[str, float]] = []
    for index in range(steps):
        say(f"step {index + 1} of {steps} in turn")
        places = range(index, index + len(everybody))
        times = {}
        for each in (everybody[place % len(everybody)] for place in places):
            if each.takes_part:
                each.step()
            if each.takes_part:
                times[each.label] = each.done[-1]["step_ms"]
        rounds.append(times)
    return rounds


def _row(
    each: Contestant, everybody: Sequence[Contestant], rounds: list[dict[str, float]], facts: Row
) -> Row:
    row: Row = {"contestant": each.label, "budget_bytes": each.way.budget_bytes, **each.prepared}
    if each.ended:
        return row | each.ended
    timed = each.done[-len(rounds) :]
    own = {name: [step[name] for step in timed if name in step] for name in OF_STEPS}
    highest = max(step["peak_bytes"] for step in each.done)
    row |= {name: value for name, value in facts.items() if value is not None}
    row |= {"steps_ms": [times[each.label] for times in rounds]}
    row |= {"peak_bytes": max(highest, facts.get("session_peak_bytes") or 0)}
    row |= {name: values[-1] for name, values in own.items() if values and name != "peak_bytes"}
    if own["saved_bytes"]:
        row["saved_bytes"] = max(own["saved_bytes"])
    return row | {
        f"step_vs_{other.label}": ratio
        for other in everybody
        if (ratio := _step_ratio(rounds, each.label, other.label)) is not None
    }


def _step_ratio(rounds: list[dict[str, Any]], one: str, other: str) -> float | None:
    """Return the median over rounds of one's time over the other's; None if one never ran."""
    pairs = [times[one] / times[other] for times in rounds if one in times and other in times]
    return statistics.median(pairs) if pairs and one != other else None
