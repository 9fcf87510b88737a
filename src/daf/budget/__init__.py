"""The budget in force now, from live limits and the user's request.

What the process holds belongs to ``memory``, what to do under a budget to ``planning``.
"""

from daf.budget.governor import Governor, Reading
from daf.budget.limits import (
    Bound,
    Limits,
    bounds_of,
    cgroup_limit_bytes,
    headroom_bytes,
    read_bounds,
    read_limits,
    room_bytes,
)
from daf.budget.pressure import open_triggers
from daf.budget.request import AUTO, Budget, BudgetValue, Request, parse_budget
from daf.budget.system import THIS_SYSTEM, System
from daf.budget.watcher import Watcher

__all__ = [
    "AUTO",
    "THIS_SYSTEM",
    "Bound",
    "Budget",
    "BudgetValue",
    "Governor",
    "Limits",
    "Reading",
    "Request",
    "System",
    "Watcher",
    "bounds_of",
    "cgroup_limit_bytes",
    "headroom_bytes",
    "open_triggers",
    "parse_budget",
    "read_bounds",
    "read_limits",
    "room_bytes",
]
