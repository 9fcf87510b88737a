"""What happens to a random run beside its steps: budgets that move, NumPy arrays, releases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_QUIET = 0.4  # of the runs, in which nothing of it happens
_BURST_SHARES = (0.05, 0.6)  # of the budget above the floor
_MOVE_SHARES = (0.5, 1.0)  # of the budget above the floor
_MOVED = 0.5  # of the other runs


@dataclass(frozen=True, slots=True)
class Move:
    """The budget becomes ``share`` of what was asked above the floor, before or within a step.

    ``delay``: of a step's time, after its beginning; 0: between steps.
    """

    step: int
    share: float
    delay: float


@dataclass(frozen=True, slots=True)
class Events:
    """``bursts``: by step, shares of the budget above the floor that one NumPy array takes.

    They come between steps; ``inside``: in the loss function, every step, in bytes.
    """

    moves: tuple[Move, ...] = ()
    bursts: tuple[tuple[int, float], ...] = ()
    inside_bytes: int = 0
    releases: bool = False


def draw_events(seed: int, steps: int) -> Events:
    """Return what this seed brings in ``steps`` steps; nothing in two runs of five."""
    random = np.random.default_rng([seed, 0xE7E])
    if random.random() < _QUIET:
        return Events()
    moves = ()
    if random.random() < _MOVED:
        moves = tuple(_move(random, step) for step in range(1, steps))
    bursts = tuple((step, float(random.uniform(*_BURST_SHARES))) for step in range(steps))
    inside = int(random.integers(1, 40)) * 10**6 if random.random() < 0.3 else 0
    return Events(moves, bursts, inside, releases=bool(random.random() < 0.4))


def _move(random: np.random.Generator, step: int) -> Move:
    delay = float(random.uniform(0.0, 1.0)) if random.random() < 0.5 else 0.0
    return Move(step, float(random.uniform(*_MOVE_SHARES)), delay)
