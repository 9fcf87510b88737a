"""How fast others fill a limit, and what they will have taken before it is felt here."""

from __future__ import annotations

from daf.governor.limits import Bound

MIB = 2**20
# From a reading to the moment at which a lower budget is felt: the next reading, and the kernel
# that is running when it comes.
AHEAD_S = 0.06
# Two readings closer together than this tell more of chance than of a rate.
LEAST_BETWEEN_S = 0.01
# What a rate may cost at most; a jump is no rate, and would take the whole budget.
MOST_BYTES = 64 * MIB


class Growth:
    """Remembers what every bound left, reading by reading."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self._ahead: dict[str, int] = {}

    def note(self, bounds: tuple[Bound, ...], now_s: float) -> None:
        """Another reading (seconds that only grow)."""
        for bound in bounds:
            seen_s, before = self._seen.get(bound.name, (now_s, bound.most_bytes))
            if now_s - seen_s >= LEAST_BETWEEN_S:
                lost = max(0, before - bound.most_bytes)
                ahead = int(lost * AHEAD_S / (now_s - seen_s))
                self._ahead[bound.name] = min(MOST_BYTES, ahead)
            elif bound.name in self._seen:
                continue
            self._seen[bound.name] = (now_s, bound.most_bytes)

    def ahead_bytes(self, bound: Bound) -> int:
        """What others take within ``AHEAD_S`` if they go on as between the last two readings."""
        return self._ahead.get(bound.name, 0)
