"""A choice of strategies that is checked while running: what ``daf bench reduce --varying`` tests.

Now and then a call times a challenger beside the chosen strategy. A challenger takes over after
several wins in a row, so that the choice follows clocks and contention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from daf.kernels.autotune import MARGIN, Choice, Chooser, Trial

CHECK_SHARE = 0.005  # of the time spent reducing that checks may take
CONFIRMATIONS = 3


@dataclass
class _Checks:
    """When a choice is checked next, and against which strategy."""

    choice: Choice
    spent_seconds: float = 0.0  # since the last check
    next_challenger: int = 0
    wins: dict[str, int] = field(default_factory=dict)
    due_seconds: float = field(init=False)  # spent_seconds at which the next check is due

    def __post_init__(self) -> None:
        self.plan_next()

    def challenger(self) -> str:
        """Return the winner of the last check; without one, each of the others in turn."""
        if self.wins:
            return next(iter(self.wins))
        others = [name for name in self.choice.seconds if name != self.choice.chosen]
        return others[self.next_challenger % len(others)] if others else self.choice.chosen

    def plan_next(self) -> None:
        """Set ``due_seconds`` once, so that a call between checks costs next to nothing."""
        choice, challenger = self.choice, self.challenger()
        cost = 2 * (choice.seconds[choice.chosen] + choice.seconds[challenger])  # a warm-up each
        self.due_seconds = math.inf if challenger == choice.chosen else cost / CHECK_SHARE


class RetimingChooser(Chooser):
    """Chooses on first use, then sometimes times a challenger."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of ``Chooser``."""
        super().__init__(*args, **options)
        self._checks: dict[str, _Checks] = {}

    def choose(self, shape_class: str, trial: Trial) -> str:
        """Return the strategy for one call, after a check if one is due."""
        choice = self.choice_for(shape_class, trial)
        checks = self._checks.get(shape_class)
        if checks is None:
            checks = self._checks[shape_class] = _Checks(choice)
        checks.spent_seconds += choice.seconds[choice.chosen]
        if checks.spent_seconds >= checks.due_seconds:
            self._check(checks, trial)
        return choice.chosen

    def _check(self, checks: _Checks, trial: Trial) -> None:
        choice, challenger = checks.choice, checks.challenger()
        checks.spent_seconds = 0.0
        checks.next_challenger += 1
        pair = (choice.chosen, challenger)
        # In alternating order: the second may find in a cache what the first one fetched.
        for name in pair if checks.next_challenger % 2 else pair[::-1]:
            trial.warm_up(name)
            choice.seconds[name] = trial.seconds(name)
        if choice.seconds[challenger] >= choice.seconds[choice.chosen] * (1 - MARGIN):
            checks.wins.clear()
        else:
            self._note_win(checks, challenger)
        checks.plan_next()

    def _note_win(self, checks: _Checks, challenger: str) -> None:
        checks.wins[challenger] = checks.wins.get(challenger, 0) + 1
        if checks.wins[challenger] >= CONFIRMATIONS:
            checks.choice.chosen = challenger
            checks.wins.clear()
            self._write()
