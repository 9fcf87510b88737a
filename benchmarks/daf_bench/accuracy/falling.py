"""``falling-KIND``: codes in a pool whose cap falls in every second step, so that planes go.

DAF (arXiv 2507.07149) names an accuracy collapse if what is important is evicted, and leaves
open which metric of importance is best. Four-bit codes lose planes after the forward pass here, by
importance that is measured (``measured``), the same everywhere (``uniform``), measured but dealt to
other sites (``shuffled``), or its inverse (``inverted``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from daf.capture.compress import compress
from daf.core.policy import Method, Policy, Site, coded_policy

FALLING = "falling-"
MEASURED, UNIFORM, SHUFFLED, INVERTED = "measured", "uniform", "shuffled", "inverted"
KINDS = (MEASURED, UNIFORM, SHUFFLED, INVERTED)
BITS, LEFT, EVERY = 4, 0.5, 2  # of the codes' bytes, after every second forward pass
_LEAST_WEIGHT = 1e-6
_NOT_IN_THE_POOL = frozenset({Method.KEEP, Method.DROP, Method.REDERIVE})


def falling_policy(kind: str, weights: Mapping[Site, float], seed: int = 0) -> Policy:
    """Return four bits everywhere, with the importances of a kind; ``weights`` are measured."""
    found = dict(weights)
    if kind == UNIFORM:
        found = {}
    if kind == SHUFFLED:
        dealt = random.Random(seed).sample([*found.values()], len(found))
        found = dict(zip(found, dealt, strict=True))
    if kind == INVERTED:
        found = inverted(found)
    return replace(coded_policy(BITS), weights=MappingProxyType(found))


def inverted(weights: Mapping[Site, float]) -> dict[Site, float]:
    """Return importances by which what was measured to matter most goes first."""
    return {site: 1.0 / max(_LEAST_WEIGHT, weight) for site, weight in weights.items()}


class FallingCap:
    """The cap of one run's pool; ``evicted_share`` is of the codes' bytes in steps that it fell."""

    def __init__(self) -> None:
        self._shares: list[float] = []

    @property
    def evicted_share(self) -> float:
        """The mean over the steps in which the cap fell."""
        return sum(self._shares) / max(1, len(self._shares))

    def fall(self, step: int, coded: compress) -> None:
        """Lower the cap, in every second step, between forward and backward."""
        if step % EVERY == 0:
            return
        held = sum(
            each.held_bytes
            for each in coded.sites()
            if each.treatment.method not in _NOT_IN_THE_POOL
        )
        coded.pool_bytes = int(LEFT * held)
        self._shares.append(coded.stats.evicted_bytes / max(1, held))

    @staticmethod
    def rise(coded: compress) -> None:
        """Lift the cap for the next step."""
        coded.pool_bytes = None
