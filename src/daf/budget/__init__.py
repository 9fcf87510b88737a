"""Live limits and the user's own wish, to today's budget.

``system`` says where readings come from, ``groups`` finds the memory cgroups,
``limits`` lists every bound, ``pressure`` measures stalls, ``request`` reads what
the user asked, ``budget`` joins them, ``watcher`` looks again while a step runs.
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
