"""Which of several strategies is fastest here, found by trying, and found again while it runs.

Nothing here knows what a strategy does or what a clock is: callers bring a
function that runs one and returns its seconds. A :class:`Chooser` measures
every strategy on first use of a (device, shape class), within a time limit; from
then on it now and then times the chosen one beside a challenger, and changes
its mind when a challenger wins several such checks in a row. DAF (arXiv
2507.07149) profiles offline; clocks and contention change while a run lasts.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daf.errors import KernelError

Run = Callable[[str], float]

CALIBRATION_SECONDS = 0.045
CHECK_SHARE = 0.005  # of the time spent reducing that checks may take
CONFIRMATIONS = 3
MARGIN = 0.03  # a challenger must be faster by this much: noise must not flip
_MOST_SAMPLES = 9


def calibrate(
    strategies: Sequence[str], run: Run, limit_seconds: float = CALIBRATION_SECONDS
) -> dict[str, float]:
    """Median seconds of each strategy, tried in turn until the limit or nine rounds.

    A strategy begins only while seconds are left for as long as its own last
    run took, so the limit is passed by at most the first run of each. A
    strategy's first run, which may compile or warm a cache, counts only where
    there is no other.

    Raises:
        KernelError: there is nothing to choose from.
    """
    if not strategies:
        raise KernelError("asked to choose among no strategies; give at least one")
    samples = {name: [run(name)] for name in strategies}
    spent = sum(seconds for (seconds,) in samples.values())
    for _ in range(_MOST_SAMPLES):
        for name in strategies:
            if spent + samples[name][-1] <= limit_seconds:
                samples[name].append(run(name))
                spent += samples[name][-1]
    return {name: statistics.median(taken[1:] or taken) for name, taken in samples.items()}


@dataclass
class _Choice:
    """What is known of one shape class."""

    seconds: dict[str, float]
    chosen: str
    spent_seconds: float = 0.0  # since the last check
    next_challenger: int = 0
    wins: dict[str, int] = field(default_factory=dict)
    due_seconds: float = field(init=False)  # spent by when the next one is due

    def __post_init__(self) -> None:
        self.plan_check()

    def challenger(self) -> str:
        """Whoever won last time goes again; else each in turn."""
        if self.wins:
            return next(iter(self.wins))
        others = [name for name in self.seconds if name != self.chosen]
        return others[self.next_challenger % len(others)] if others else self.chosen

    def plan_check(self) -> None:
        """Worked out once, so that a call costs next to nothing between checks."""
        challenger = self.challenger()
        cost = self.seconds[self.chosen] + self.seconds[challenger]
        self.due_seconds = math.inf if challenger == self.chosen else cost / CHECK_SHARE


class Chooser:
    """The strategy to use for each shape class of one device."""

    def __init__(self, device: str, strategies: Sequence[str], cache: Path | None = None) -> None:
        """Read what an earlier process found, where the cache file has it."""
        self._device = device
        self._strategies = tuple(strategies)
        self._cache = cache
        self._choices = {
            name: _Choice(seconds, min(seconds, key=seconds.__getitem__))
            for name, seconds in self._read().items()
        }

    def choose(self, shape_class: str, run: Run) -> str:
        """The strategy for one call; on first use of a class, all are tried through ``run``."""
        choice = self._choices.get(shape_class)
        if choice is None:
            choice = self._calibrated(shape_class, run)
        choice.spent_seconds += choice.seconds[choice.chosen]
        if choice.spent_seconds >= choice.due_seconds:
            self._check(choice, run)
        return choice.chosen

    def _calibrated(self, shape_class: str, run: Run) -> _Choice:
        seconds = calibrate(self._strategies, run)
        choice = _Choice(seconds, min(seconds, key=seconds.__getitem__))
        self._choices[shape_class] = choice
        self._write()
        return choice

    def _check(self, choice: _Choice, run: Run) -> None:
        challenger = choice.challenger()
        choice.spent_seconds = 0.0
        choice.next_challenger += 1
        for name in (choice.chosen, challenger):
            choice.seconds[name] = run(name)
        if choice.seconds[challenger] >= choice.seconds[choice.chosen] * (1 - MARGIN):
            choice.wins.clear()
        else:
            self._note_win(choice, challenger)
        choice.plan_check()

    def _note_win(self, choice: _Choice, challenger: str) -> None:
        choice.wins[challenger] = choice.wins.get(challenger, 0) + 1
        if choice.wins[challenger] >= CONFIRMATIONS:
            choice.chosen = challenger
            choice.wins.clear()
            self._write()

    # --- cache file -------------------------------------------------------------------------

    def _read(self) -> dict[str, dict[str, float]]:
        """This device's classes for which the file names every strategy."""
        found = self._whole_file().get(self._device, {})
        if not isinstance(found, dict):
            return {}
        return {
            name: {key: float(value) for key, value in seconds.items()}
            for name, seconds in found.items()
            if set(seconds) == set(self._strategies)
        }

    def _whole_file(self) -> Mapping[str, Any]:
        if self._cache is None or not self._cache.exists():
            return {}
        try:
            content = json.loads(self._cache.read_text())
        except (ValueError, OSError) as problem:
            warnings.warn(
                f"{self._cache} is no cache of DAF ({problem}); measuring anew", stacklevel=3
            )
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self) -> None:
        """Beside other devices' entries; a reader sees the old file or the new one, whole."""
        if self._cache is None:
            return
        ours = {name: choice.seconds for name, choice in self._choices.items()}
        content = dict(self._whole_file()) | {self._device: ours}
        fresh = self._cache.with_name(f"{self._cache.name}.{os.getpid()}")
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(content, indent=1))
            fresh.replace(self._cache)
        except OSError as problem:  # a full disk is no reason to stop what runs
            warnings.warn(f"{self._cache} is not kept ({problem})", stacklevel=4)
            self._cache = None
