"""Chooses the fastest strategy on first use, in bounded time; DAF (arXiv 2507.07149): offline."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from daf.core.errors import KernelError
from daf.files.cache import keep, kept

Clock = Callable[[], float]

CALIBRATION_SECONDS = 0.04  # with the file and the last run less than 0.05 in all
MARGIN = 0.03  # a challenger must be faster by this much: noise must not flip
HOPELESS = 3.0  # times the best seconds: slower strategies are tried on a part only
STARTING_SECONDS = 1.5e-4  # at most: the host starts and awaits a strategy's kernels on a GPU
# Of two runs each: threads of whoever ran before may spin for a while. A part is sampled in this
# share of the time, since one disturbed run would rule a strategy out.
PART_PAIRS, PART_SHARE, MOST_PAIRS = 2, 0.3, 12


class Trial(Protocol):
    """One call that strategies compete for."""

    def usual(self) -> str | None:
        """Return the strategy to keep unless another is clearly faster; None: nothing is known."""

    def warm_up(self, name: str) -> None:
        """Run once untimed, for what only a first run takes, such as compiling."""

    def seconds(self, name: str) -> float:
        """Return the seconds of one run."""

    def part(self) -> "Trial":
        """Return the same on a small part of the input, or itself if the input is small."""


def calibrate(
    strategies: Sequence[str],
    trial: Trial,
    limit_seconds: float = CALIBRATION_SECONDS,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Return each strategy's seconds, found within ``limit_seconds`` besides warming up.

    All run on a part of the input, and those not hopeless there run on the whole in turn, best
    first, while time lasts. The others are predicted from the part, none below those run. Beyond
    the limit go at most a run each on the part, and what a run is slower than the slowest before.
    KernelError: there is nothing to choose from.
    """
    if not strategies:
        raise KernelError("asked to choose among no strategies; give at least one")
    end = clock() + limit_seconds

    def sampled(names: Sequence[str], trial: Trial, most: int, spared: float) -> dict[str, float]:
        nonlocal end
        found: dict[str, float] = {}  # the least, since disturbances only add time
        slowest = 0.0
        for name in (*names, *([each for each in names for _ in "ab"] * most)):
            is_over = clock() + slowest > end - spared
            if is_over and (not spared or name in found):
                continue
            if name not in found:
                begin = clock()
                trial.warm_up(name)
                end += clock() - begin
            taken = trial.seconds(name)
            if name not in found and clock() + max(taken, slowest) <= end - limit_seconds / 2:
                taken = min(taken, trial.seconds(name))
            found[name], slowest = min(taken, found.get(name, taken)), max(slowest, taken)
        return found

    of_part = sampled(strategies, trial.part(), PART_PAIRS, (1 - PART_SHARE) * limit_seconds)
    most = HOPELESS * min(of_part.values()) + STARTING_SECONDS
    hopeful = [name for name in sorted(of_part, key=of_part.__getitem__) if of_part[name] <= most]
    seconds = sampled(hopeful, trial, MOST_PAIRS, 0.0)
    pace = max((each / of_part[name] for name, each in seconds.items()), default=1.0)
    least = max(seconds.values(), default=0.0)  # of those that did not run on the whole
    return {name: seconds.get(name, max(least, pace * each)) for name, each in of_part.items()}


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
        folder: Path | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._name = re.sub(r"\W+", "-", device)
        self._strategies, self._folder, self._clock = tuple(strategies), folder, clock
        self._choices: dict[str, Choice] = {}
        found = (kept(folder, self._name) if folder else None) or {}
        with suppress(TypeError):  # of another version
            self._choices = {name: Choice(**found[name]) for name in found}

    def choose(self, shape_class: str, trial: Trial) -> str:
        """Return the strategy for one call; the first call of a class tries them all."""
        return self.choice_for(shape_class, trial).chosen

    def choice_for(self, shape_class: str, trial: Trial) -> Choice:
        """Return the choice with the seconds behind it; benchmarks time it again from there."""
        known = self._choices.get(shape_class)
        if known is None or known.seconds.keys() != {*self._strategies}:  # of other strategies
            seconds = calibrate(self._strategies, trial, clock=self._clock)
            best, usual = min(seconds, key=seconds.__getitem__), trial.usual()
            if usual is not None and not seconds[best] < seconds[usual] * (1 - MARGIN):
                best = usual
            self._choices[shape_class] = Choice(seconds, best)
            self._write()
        return self._choices[shape_class]

    def _write(self) -> None:
        if self._folder is not None:
            choices = {name: asdict(choice) for name, choice in self._choices.items()}
            keep(self._folder, self._name, choices)
