"""Chooses the fastest of several strategies by timing them on first use.

DAF (arXiv 2507.07149) profiles offline; here a time limit bounds it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from daf.core.errors import KernelError

Clock = Callable[[], float]

CALIBRATION_SECONDS = 0.04  # with the file and the last run less than 0.05 in all
MARGIN = 0.03  # a challenger must be faster by this much: noise must not flip
HOPELESS = 3.0  # times the best seconds: slower strategies are not tried further
CAUTION = 3.0  # a part may lie in a cache that the whole input does not fit
_LEAST_SAMPLES = 3  # before a strategy is dropped
_MOST_SAMPLES = 9


class Trial(Protocol):
    """One call that strategies compete for."""

    @property
    def size(self) -> int:
        """Amount of work; seconds grow about in proportion."""

    @property
    def start_seconds(self) -> float:
        """Seconds that a run may take however little work there is."""

    def usual(self) -> str | None:
        """Return the strategy to keep unless another is clearly faster; None: nothing is known."""

    def warm_up(self, name: str) -> None:
        """Run once untimed, for what only a first run takes, such as compiling."""

    def seconds(self, name: str) -> float:
        """Return the seconds of one run."""

    def part(self) -> Trial | None:
        """Return the same on a small part of the input; None if the input is small itself."""


def calibrate(
    strategies: Sequence[str],
    trial: Trial,
    limit_seconds: float = CALIBRATION_SECONDS,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Return each strategy's seconds, found within ``limit_seconds`` besides compiling.

    If the input has a part, all strategies run on it first, and only those not hopeless there run
    on the whole, best first, while time lasts. The others are predicted from the part, none below
    those run. Beyond the limit go at most one run of each strategy on the part (or on an input
    without one), and runs slower than predicted. KernelError: there is nothing to choose from.
    """
    if not strategies:
        raise KernelError("asked to choose among no strategies; give at least one")
    allowance = _Allowance(limit_seconds, clock)
    part = trial.part()
    small = part or trial
    samples = {name: [allowance.first_run(name, small)] for name in strategies}
    seconds = _medians(samples, strategies, small, allowance, _LEAST_SAMPLES)
    if part is not None:
        return _of_all(seconds, part, trial, allowance)
    hopeful = _hopeful(seconds, trial.start_seconds)
    return _medians(samples, hopeful, trial, allowance, _MOST_SAMPLES)


class _Allowance:
    """The time that is left, not counting compiling."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def allows(self, seconds: float) -> bool:
        return self._clock() + seconds <= self._end

    def first_run(self, name: str, trial: Trial) -> float:
        """Return the seconds of a run after a warm-up, whose excess over it counts as compiling."""
        begin = self._clock()
        trial.warm_up(name)
        between = self._clock()
        seconds = trial.seconds(name)
        again = self._clock() - between
        self._end += max(0.0, between - begin - again)
        return seconds


def _medians(
    samples: dict[str, list[float]],
    names: Sequence[str],
    trial: Trial,
    allowance: _Allowance,
    most: int,
) -> dict[str, float]:
    """Return medians of all samples, running names in turn until ``most`` each or time is up."""
    for _ in range(most):
        for name in names:
            if len(samples[name]) < most and allowance.allows(samples[name][-1]):
                samples[name].append(trial.seconds(name))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def _of_all(
    of_part: dict[str, float], part: Trial, trial: Trial, allowance: _Allowance
) -> dict[str, float]:
    """Return seconds on the whole input; what did not run is predicted, none below those run."""
    growth = trial.size / part.size
    samples: dict[str, list[float]] = {}
    for name in _hopeful(of_part, part.start_seconds):
        beyond = max(0.0, of_part[name] - part.start_seconds)
        foreseen = _pace(samples, of_part) * of_part[name] if samples else CAUTION * growth * beyond
        if not allowance.allows(foreseen):
            break
        samples[name] = [allowance.first_run(name, trial)]
    seconds = _medians(samples, [*samples], trial, allowance, _MOST_SAMPLES)
    pace = _pace({name: [each] for name, each in seconds.items()}, of_part) if seconds else growth
    return {name: seconds.get(name, pace * each) for name, each in of_part.items()}


def _hopeful(of_part: dict[str, float], start_seconds: float) -> list[str]:
    """Return the names within ``HOPELESS`` of the best, fastest first, allowing for start costs."""
    most = HOPELESS * min(of_part.values()) + start_seconds
    return [name for name in sorted(of_part, key=of_part.__getitem__) if of_part[name] <= most]


def _pace(samples: Mapping[str, Sequence[float]], of_part: Mapping[str, float]) -> float:
    return max(taken[0] / of_part[name] for name, taken in samples.items())


@dataclass
class Choice:
    """The strategy chosen for one shape class, and the seconds that each took."""

    seconds: dict[str, float]
    chosen: str


class Chooser:
    """Chooses the strategy for each shape class of one device."""

    def __init__(
        self,
        device: str,
        strategies: Sequence[str],
        cache: Path | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._device = device
        self._strategies = tuple(strategies)
        self._cache = cache
        self._clock = clock
        self._choices = self._read()

    def choose(self, shape_class: str, trial: Trial) -> str:
        """Return the strategy for one call; the first call of a class tries them all."""
        return self.choice_for(shape_class, trial).chosen

    def choice_for(self, shape_class: str, trial: Trial) -> Choice:
        """Return the choice with the seconds behind it; benchmarks time it again from there."""
        if shape_class not in self._choices:
            seconds = calibrate(self._strategies, trial, clock=self._clock)
            best, usual = min(seconds, key=seconds.__getitem__), trial.usual()
            if usual is not None and not seconds[best] < seconds[usual] * (1 - MARGIN):
                best = usual
            self._choices[shape_class] = Choice(seconds, best)
            self._write()
        return self._choices[shape_class]

    def _read(self) -> dict[str, Choice]:
        """Return this device's classes whose entry covers exactly these strategies."""
        found = self._whole_file().get(self._device, {})
        if not isinstance(found, dict):
            return {}
        return {name: Choice(**entry) for name, entry in found.items() if self._is_ours(entry)}

    def _is_ours(self, entry: Any) -> bool:
        """True if valid; older versions kept only seconds, some of them of compiling."""
        if not isinstance(entry, dict) or set(entry) != {"seconds", "chosen"}:
            return False
        is_whole = isinstance(entry["seconds"], dict) and entry["chosen"] in entry["seconds"]
        return is_whole and set(entry["seconds"]) == set(self._strategies)

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
        """Write this device's entries; a reader sees the old or the new file, whole."""
        if self._cache is None:
            return
        ours = {name: asdict(choice) for name, choice in self._choices.items()}
        content = dict(self._whole_file()) | {self._device: ours}
        fresh = self._cache.with_name(f"{self._cache.name}.{os.getpid()}")
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(content, indent=1))
            fresh.replace(self._cache)
        except OSError as problem:  # a full disk must not stop the run
            warnings.warn(f"{self._cache} is not kept ({problem})", stacklevel=4)
            self._cache = None
