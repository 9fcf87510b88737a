"""What makes a hostile data set."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Lie:
    """A kind of lie: ``make(draw, folder)`` writes data there and returns ``NAME:PATH`` of them."""

    make: Callable[[random.Random, Path], str]
    must_be_refused: bool = True


def mutated(draw: random.Random, content: bytes) -> bytes:
    """Return ``content`` with some bytes changed, mostly near its beginning, or cut."""
    if draw.random() < 0.2:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.randrange(1, 8)):
        end = len(changed) if draw.random() < 0.4 else min(len(changed), 300)
        changed[draw.randrange(end)] = draw.randrange(256)
    return bytes(changed)
