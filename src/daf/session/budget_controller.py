"""A session's budget while it trains: watched, and applied at once.

When it falls in mid-step, recycled blocks return to the system, the pool evicts planes, and further
allocations are refused. Between steps ``PlanController`` plans anew.
"""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from daf.budget.governor import Governor, Reading
from daf.budget.pressure import open_triggers
from daf.budget.request import Budget
from daf.budget.watcher import Watcher
from daf.core.plan import Plan
from daf.memory.keeper import Keeper
from daf.memory.owners import account_lock

# Near the tightest limit other processes can fill it within milliseconds; far from it, a process
# would have to allocate 5 GB/s to reach it between two looks.
LOOK_S = 0.02
LOOK_FAR_S = 0.2
FAR_BYTES = 10**9
ANOTHERS = "the budget of another session"
MOST_CHANGES = 1000  # in a history: a budget that is a function may move at every look

_living: "weakref.WeakSet[BudgetController]" = weakref.WeakSet()  # of all sessions


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """A change of the budget (None: no budget) at ``perf_counter`` time; bytes evicted at once."""

    time_s: float
    budget_bytes: int | None
    reason: str
    evicted_bytes: int = 0


@dataclass(eq=False)
class BudgetController:
    """One session's budget: asks the governor, applies the answer at once, and keeps the history.

    ``lowest_bytes``: the lowest budget since ``bound``. ``on_lower`` is called first when the
    budget falls, to free what only saves time.
    """

    governor: Governor
    keeper: Keeper
    on_lower: Callable[[], None]

    def __post_init__(self) -> None:
        self._watcher: Watcher | None = None
        self._looked_s = float("-inf")
        budget_bytes, reason = self.governor.reading
        self.budget_bytes, self.is_anothers = budget_bytes, False
        self.lowest_bytes = budget_bytes
        self.history = [BudgetChange(time.perf_counter(), budget_bytes, reason)]
        _living.add(self)

    @property
    def asked(self) -> Budget:
        """The budget that the user asked for last."""
        return self.governor.asked

    def ask(self, budget: Budget) -> None:
        """Change the budget; before returning free all that can be. Raises as ``Governor.ask``."""
        self.governor.ask(budget)
        self.follow()

    def begin_step(self) -> int | None:
        """Read the limits, watch them, return the budget (bytes); raises as ``refresh``."""
        is_fresh = time.perf_counter() - self._looked_s < LOOK_S and self.is_watching
        if not is_fresh or callable(self.asked):
            self._look()
        self.follow()
        self.watch()
        return self.budget_bytes

    def _look(self, *, urgent: bool = False) -> None:
        self.governor.refresh(urgent=urgent)
        self._looked_s = time.perf_counter()

    def bound(self, plan: Plan) -> int | None:
        """Bound memory for a step; return the budget less the plan's peak, None without one."""
        with account_lock:  # no lower budget may come in between
            self.lowest_bytes = self.budget_bytes
            if self.budget_bytes is None:
                return None
            self.keeper.bound(plan.predicted_peak_bytes, self.budget_bytes)
            return max(0, self.budget_bytes - plan.predicted_peak_bytes)

    @property
    def has_risen(self) -> bool:
        """True if the budget was lower at a moment since ``bound`` than it is now."""
        with account_lock:
            lowest, now = self.lowest_bytes, self.budget_bytes
            return lowest is not None and (now is None or now > lowest)

    @property
    def is_watching(self) -> bool:
        """True from the first step under a budget until ``close``: meanwhile it binds others."""
        return self._watcher is not None and self._watcher.is_alive

    def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
            self._tell_others()

    def watch(self) -> None:
        """Start a thread that looks at the limits, where there are any to follow."""
        if self.is_watching:
            return
        if self.budget_bytes is None and not callable(self.asked):
            return
        triggers = open_triggers(self.governor.system) if self.governor.follows_pressure else []
        self._watcher = Watcher(self.look, triggers)
        self._tell_others()

    def look(self, urgent: bool) -> float:
        """Refresh and act, on the watcher's thread; return the seconds until the next look."""
        try:
            self._look(urgent=urgent)
        except Exception:  # a user's function may raise anything; the next step's refresh raises it
            return LOOK_FAR_S
        self.follow()
        near = self.keeper.follow_growth() or self.governor.slack_bytes() < FAR_BYTES
        return LOOK_S if near or callable(self.asked) else LOOK_FAR_S

    def follow(self) -> None:
        """Apply at once what this budget and others' leave now."""
        (budget_bytes, reason), before = self._reading(), self.budget_bytes
        if budget_bytes == before and self.is_anothers == (reason == ANOTHERS):
            return  # who changes it acts itself
        if budget_bytes is not None and (before is None or budget_bytes < before):
            self.on_lower()  # without the lock: it may wait for a thread that allocates
        with account_lock:
            budget_bytes, reason = self._reading()
            self.is_anothers = reason == ANOTHERS
            if budget_bytes == self.budget_bytes:
                return
            self.lowest_bytes = _least(self.lowest_bytes, budget_bytes)
            evicted = self.keeper.rebound(budget_bytes)
            self.history.append(BudgetChange(time.perf_counter(), budget_bytes, reason, evicted))
            del self.history[:-MOST_CHANGES]
            self.budget_bytes = budget_bytes  # last: whoever reads it finds it in the history
        self._tell_others()

    def _reading(self) -> Reading:
        """Return the governor's reading, or the budget of another session if that is lower."""
        # Every living session's budget bounds the same process, so the least is every session's.
        own = self.governor.reading
        if own.budget_bytes is None:
            return own
        others = [each for each in self._others() if each.is_watching]
        least = _least(own.budget_bytes, *(e.governor.reading.budget_bytes for e in others))
        return own if least == own.budget_bytes else Reading(least, ANOTHERS)

    def _tell_others(self) -> None:
        """Let what this budget leaves act at once; each one's own changes once at most."""
        for each in self._others():
            each.follow()

    def _others(self) -> "list[BudgetController]":
        if len(_living) == 1:
            return []
        name = self.keeper.memory_name
        return [e for e in list(_living) if e is not self and e.keeper.memory_name == name]


def _least(*budgets: int | None) -> int | None:
    return min((each for each in budgets if each is not None), default=None)
