"""A budget that moves while a session trains: watched, and acted on at once.

In mid-step a lower budget acts at once: recycled blocks go back to the system, the pool evicts
planes, further allocations are refused, and the session retries a refused step under a tighter
plan. Between steps the session plans anew (``PlanController``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from daf.budget import THIS_SYSTEM, Bound, Budget, Governor, System, Watcher, open_triggers
from daf.core.plan import Plan
from daf.memory.limit_protocol import Keeper
from daf.memory.process_limit import account_lock

# While the tightest limit is near, others can fill it within milliseconds; far from it, a process
# would have to allocate 5 GB/s to get there between two looks.
LOOK_S = 0.02
LOOK_FAR_S = 0.2
FAR_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """The budget moved (bytes; None: no budget).

    ``time_s`` is on the clock of ``time.perf_counter()``; ``evicted_bytes`` of
    codes were evicted at once.
    """

    time_s: float
    budget_bytes: int | None
    reason: str
    evicted_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class BudgetController:
    """One session's budget: asks the governor, acts at once, and remembers what happened.

    Args:
        asked: what the user gave.
        keeper: what bounds the memory.
        on_lower: called first when the budget falls, to let go of what only saves time.
        system: the machine to read limits from.
        bounds: reads the bounds of a device's memory instead, where the budget is of that.

    Raises:
        UnitError: the budget cannot be read.
    """

    def __init__(
        self,
        asked: Budget,
        keeper: Keeper,
        on_lower: Callable[[], None] = lambda: None,
        system: System = THIS_SYSTEM,
        bounds: Callable[[], tuple[Bound, ...]] | None = None,
    ) -> None:
        self._governor = Governor(asked, system, bounds=bounds)
        self._keeper = keeper
        self._on_lower = on_lower
        self._system = system
        self._watcher: Watcher | None = None
        budget_bytes, reason = self._governor.reading
        self.budget_bytes = budget_bytes
        self.history = [BudgetChange(time.perf_counter(), budget_bytes, reason)]

    @property
    def asked(self) -> Budget:
        """The budget as the user asked for it last."""
        return self._governor.asked

    def ask(self, budget: Budget) -> None:
        """Another budget; when this returns, all that can be freed at once is free.

        Raises:
            UnitError: it cannot be read; nothing changes.
        """
        self._governor.ask(budget)
        self._act()

    def begin_step(self) -> int | None:
        """Read the limits, watch them from now on, and return the budget (bytes) in force.

        Raises:
            Exception: what the user's own function raised.
        """
        self._governor.refresh()
        self._act()
        self.watch()
        return self.budget_bytes

    def bound(self, plan: Plan) -> int | None:
        """Bound the memory by the budget in force, for a step under this plan.

        The bytes of it that the plan does not count on; None: there is no budget.
        """
        with account_lock:  # so that no lower budget comes in between
            if self.budget_bytes is None:
                return None
            self._keeper.bound(plan.predicted_peak_bytes, self.budget_bytes)
            return max(0, self.budget_bytes - plan.predicted_peak_bytes)

    def close(self) -> None:
        """Watch no longer."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    # --- watching ---------------------------------------------------------------------------

    def watch(self) -> None:
        """Have a thread look at the limits, where there are any to follow."""
        if self._watcher is not None and self._watcher.is_alive:
            return
        if self.budget_bytes is None and not callable(self.asked):
            return
        triggers = open_triggers(self._system) if self._governor.follows_pressure else []
        self._watcher = Watcher(self.look, triggers)

    def look(self, urgent: bool) -> float:
        """Refresh and act; returns the seconds until the next look. Called on the thread."""
        try:
            self._governor.refresh(urgent=urgent)
        except Exception:  # a user's function may raise anything; the next step's refresh raises it
            return LOOK_FAR_S
        self._act()
        near = self._keeper.follow_growth() or self._governor.slack_bytes() < FAR_BYTES
        return LOOK_S if near or callable(self.asked) else LOOK_FAR_S

    def _act(self) -> None:
        budget_bytes, before = self._governor.reading.budget_bytes, self.budget_bytes
        if budget_bytes is not None and (before is None or budget_bytes < before):
            self._on_lower()  # without the lock: it may wait for a thread that allocates
        with account_lock:
            budget_bytes, reason = self._governor.reading
            if budget_bytes == self.budget_bytes:
                return
            self.budget_bytes = budget_bytes
            evicted = self._keeper.rebound(budget_bytes)
            change = BudgetChange(time.perf_counter(), budget_bytes, reason, evicted)
            self.history.append(change)
