"""How fast others fill a limit, and what they will have taken before it is felt here."""

from __future__ import annotations

from daf.budget.limits import Bound

MIB = 2**20
# From a reading to the moment at which a lower budget is felt: the next reading, and the kernel
# that is running when it comes. Where readings come late, because others take the processor too, so
# does all else.
AHEAD_S, MOST_AHEAD_S = 0.06, 0.2
AHEAD_READINGS = 3
# Two readings closer together than this tell more of chance than of a rate.
LEAST_BETWEEN_S = 0.01
# What a rate may cost at most; a jump is no rate, and would take the whole budget.
MOST_BYTES = 64 * MIB


class Growth:
    """Remembers what others held of every bound, reading by reading."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self._ahead: dict[str, int] = {}

    def note(self, bounds: tuple[Bound, ...], now_s: float) -> None:
        """Another reading (seconds that only grow)."""
        for bound in bounds:
            others_bytes = bound.ceiling_bytes - bound.most_bytes
            seen_s, before = self._seen.setdefault(bound.name, (now_s, others_bytes))
            between_s = now_s - seen_s
            if between_s < LEAST_BETWEEN_S:
                continue
            ahead_s = min(MOST_AHEAD_S, max(AHEAD_S, AHEAD_READINGS * between_s))
            ahead_bytes = int(max(0, others_bytes - before) * ahead_s / between_s)
            self._ahead[bound.name] = min(MOST_BYTES, ahead_bytes)
            self._seen[bound.name] = (now_s, others_bytes)

    def ahead_bytes(self, bound: Bound) -> int:
        """What others take before it is felt if they go on as between the last two readings."""
        return self._ahead.get(bound.name, 0)
