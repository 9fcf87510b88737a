"""The request and the live limits, to the budget in force now."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from daf.budget.cgroups import MemoryGroup, memory_groups
from daf.budget.limits import Bound, read_bounds
from daf.budget.pressure import STALLED_SHARE, Backoff, PressureSampler
from daf.budget.request import Budget, Request, Scope, parse_budget
from daf.budget.system import THIS_SYSTEM, System, children_bytes
from daf.core.units import format_bytes
from daf.memory.owners import account_lock

MIB = 2**20
# From a reading until a lower budget takes effect: the next reading, plus the kernel running then.
# Where others use the processor too, readings are late and so is everything else.
AHEAD_S, MOST_AHEAD_S = 0.06, 0.2
AHEAD_READINGS = 3
LEAST_BETWEEN_S = 0.01  # readings closer together measure chance, not a rate
MOST_BYTES = 64 * MIB  # that a rate may cost; a jump is none, and would take the whole budget


class Growth:
    """How fast others fill every bound: what they held of it, reading by reading."""

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


# What "auto" leaves to others: a twentieth of the tightest limit, and at least this much.
AUTO_RESERVE_FRACTION = 0.05
AUTO_RESERVE_BYTES = 64 * MIB
RESERVE_BYTES = 16 * MIB  # left free of a limit that others share; ``growth`` adds to it
# Live limits always move. Budgets that follow them fall in steps of this size, and rise only after
# lasting room for two steps more, so that not every reading makes a new plan.
STEPS = 64
STEP_BYTES = 4 * MIB
RISE_STEPS = 3  # a budget lies up to one step below its goal, which fluctuates by up to two
RISE_AFTER_S = 0.25
CHILDREN_LAST_S = 0.1  # the kernel walks all their pages
GROUPS_LAST_S = 1.0  # processes seldom change cgroup; to find one costs more than to read it
STANDING_STILL = Growth()


class Reading(NamedTuple):
    """A budget (bytes; None: no budget) and its reason."""

    budget_bytes: int | None
    reason: str


class Goal(NamedTuple):
    """Where the budget should be now; ``is_live`` if it follows a limit that moves by itself."""

    budget_bytes: int
    reason: str
    is_live: bool


def reserve_bytes(request: Request, bound: Bound, growth: Growth = STANDING_STILL) -> int:
    """Return the bytes left free of a bound; for a budget in bytes, 0 if nobody shares it."""
    ahead_bytes = growth.ahead_bytes(bound)
    if request.is_auto:
        share_bytes = int(AUTO_RESERVE_FRACTION * bound.ceiling_bytes)
        return max(AUTO_RESERVE_BYTES, share_bytes, ahead_bytes)
    others_bytes = max(0, bound.ceiling_bytes - bound.most_bytes)
    return max(min(RESERVE_BYTES, others_bytes), ahead_bytes)


def goal_of(
    request: Request, bounds: Sequence[Bound], backoff: float = 0.0, growth: Growth = STANDING_STILL
) -> Goal:
    """Return the goal within all ceilings and reserves; ``backoff``: the share "auto" cedes."""
    lowest = min(bounds, key=lambda bound: bound.ceiling_bytes)
    left = {bound: bound.most_bytes - reserve_bytes(request, bound, growth) for bound in bounds}
    tightest = min(left, key=left.__getitem__)
    live = left[tightest]
    asked = _asked_bytes(request, lowest.ceiling_bytes)
    if asked is not None and asked <= min(lowest.ceiling_bytes, live):
        return Goal(asked, "as asked", is_live=False)
    if asked is not None and lowest.ceiling_bytes <= live:
        return Goal(lowest.ceiling_bytes, f"the limit {lowest.name}", is_live=False)
    reserve = format_bytes(tightest.most_bytes - live)
    words = f"{tightest.name} less {reserve} left to others"
    if request.is_auto and backoff:
        words += f", less {100 * backoff:.0f} % under memory pressure"
        live = int(live * (1 - backoff))
    return Goal(max(1, min(live, lowest.ceiling_bytes)), words, is_live=True)


def _asked_bytes(request: Request, device_bytes: int) -> int | None:
    if request.fraction is not None:
        return max(1, int(request.fraction * device_bytes))
    return request.nbytes


@dataclass(eq=False)
class Governor:
    """Keeps the budget in force; thread-safe. Raises UnitError if it cannot be parsed.

    ``asked``: a value for ``parse_budget``, or a function that returns one at every refresh.
    ``clock``: monotonic seconds. ``bounds``: reads a device's bounds; None: the process's are read.
    ``scope``: with "tree", what children hold is no longer this process's to take.
    """

    asked: Budget  # last
    system: System = THIS_SYSTEM
    clock: Callable[[], float] = time.perf_counter
    bounds: Callable[[], tuple[Bound, ...]] | None = None
    scope: Scope = "process"

    def __post_init__(self) -> None:
        self._backoff = Backoff()
        self._growth = Growth()
        self._sampler: PressureSampler | None = None
        self._may_rise_since_s: float | None = None
        self._request: Request | None = None
        self._found: tuple[Bound, ...] = ()
        self._groups: tuple[MemoryGroup, ...] = ()
        self._groups_found_s = float("-inf")
        self._children_bytes = 0
        self._children_read_s = float("-inf")
        self.reading = Reading(None, "no budget was asked for")
        self.ask(self.asked)

    @property
    def follows_pressure(self) -> bool:
        """True if ``"auto"`` bounds this process; memory pressure says nothing of a device."""
        return self._request is not None and self._request.is_auto and self.bounds is None

    def ask(self, budget: Budget) -> Reading:
        """Replace the budget at once; raises UnitError, and keeps it, if it cannot be parsed."""
        request = parse_budget(budget() if callable(budget) else budget)
        with account_lock:
            self.asked = budget
            return self._move(request, at_once=True)

    def refresh(self, *, urgent: bool = False) -> Reading:
        """Read the user's function, the limits and, for ``"auto"``, memory pressure again.

        ``urgent``: pressure was reported. Raises what that function does, UnitError for no budget.
        """
        asked = self.asked
        request = parse_budget(asked()) if callable(asked) else None
        with account_lock:
            if asked is not self.asked:  # another thread has asked for another one meanwhile
                return self.reading
            return self._move(request if callable(asked) else self._request, urgent=urgent)

    def slack_bytes(self) -> int:
        """Return how far the tightest bound was above the budget at the last reading."""
        if self.reading.budget_bytes is None or not self._found:
            return 2**62
        return min(bound.most_bytes for bound in self._found) - self.reading.budget_bytes

    def _move(
        self, request: Request | None, *, at_once: bool = False, urgent: bool = False
    ) -> Reading:
        at_once = at_once or request != self._request
        self._request = request
        if request is None:
            self.reading = Reading(None, "no budget was asked for")
        else:
            self.reading = self._settled(request, at_once=at_once, urgent=urgent)
        return self.reading

    def _settled(self, request: Request, *, at_once: bool, urgent: bool) -> Reading:
        self._found = self._read_bounds(request)
        if self.scope == "tree":
            self._found += self._children_bound(request)
        self._growth.note(self._found, self.clock())
        backoff = self._pressure(urgent) if self.follows_pressure else 0.0
        goal = goal_of(request, self._found, backoff, self._growth)
        before = self.reading.budget_bytes
        if at_once or before is None or goal.budget_bytes < before:
            self._may_rise_since_s = None
        elif not self._may_rise(goal, before):
            return self.reading
        budget_bytes, step = goal.budget_bytes, step_bytes(goal.budget_bytes)
        if goal.is_live:
            budget_bytes = max(1, budget_bytes // step * step)
        return Reading(budget_bytes, goal.reason)

    def _read_bounds(self, request: Request) -> tuple[Bound, ...]:
        if self.bounds is not None:
            return self.bounds()
        now_s = self.clock()
        if now_s - self._groups_found_s >= GROUPS_LAST_S:
            self._groups, self._groups_found_s = memory_groups(self.system), now_s
        near = None if request.nbytes is None else request.nbytes + MOST_BYTES
        return read_bounds(self.system, near, self._groups)

    def _children_bound(self, request: Request) -> tuple[Bound, ...]:
        """Return what children leave of the budget; for "auto", other bounds count them already."""
        asked = _asked_bytes(request, min(each.ceiling_bytes for each in self._found))
        if asked is None:
            return ()
        now_s = self.clock()
        if now_s - self._children_read_s >= CHILDREN_LAST_S:
            self._children_bytes, self._children_read_s = children_bytes(self.system), now_s
        return (Bound("the budget with child processes", asked, asked - self._children_bytes),)

    def _may_rise(self, goal: Goal, before: int) -> bool:
        """True if there has been room for ``RISE_AFTER_S``."""
        # Steps at the goal: just above a power of two they are twice as long as below it.
        wanted = before + RISE_STEPS * step_bytes(goal.budget_bytes) if goal.is_live else before + 1
        if goal.budget_bytes < wanted:
            self._may_rise_since_s = None
            return False
        now_s = self.clock()
        if self._may_rise_since_s is None:
            self._may_rise_since_s = now_s
        if now_s - self._may_rise_since_s < RISE_AFTER_S:
            return False
        self._may_rise_since_s = None
        return True

    def _pressure(self, urgent: bool) -> float:
        if self._sampler is None:
            self._sampler = PressureSampler(self.system)
        now_s = self.clock()
        pressed = self._sampler.share(now_s) >= STALLED_SHARE
        return self._backoff.note(pressed or urgent, now_s)


def step_bytes(budget_bytes: int) -> int:
    """Return the least move of a budget that follows a live limit: a power of two."""
    return max(STEP_BYTES, 1 << max(1, budget_bytes // STEPS).bit_length() - 1)
