"""How fast others fill a limit, and what they take before a lower budget takes effect."""

from __future__ import annotations

from daf.budget.limits import Bound

MIB = 2**20
# From a reading until a lower budget takes effect: the next reading, plus the kernel running then.
# Where others use the processor too, readings are late and so is everything else.
AHEAD_S, MOST_AHEAD_S = 0.06, 0.2
AHEAD_READINGS = 3
LEAST_BETWEEN_S = 0.01  # readings closer together measure chance, not a rate
MOST_BYTES = 64 * MIB  # that a rate may cost; a jump is none, and would take the whole budget


class Growth:
    """What others held of every bound, reading by reading."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self._ahead: dict[str, int] = {}

    def note(self, bounds: tuple[Bound, ...], now_s: float) -> None:
        """Record a reading at ``now_s`` (monotonic seconds)."""
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
        """Return what others will take before it is felt, at the rate between the last readings."""
        return self._ahead.get(bound.name, 0)
