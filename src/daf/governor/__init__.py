"""Live limits and the user's own wish, to today's budget.

``system`` says where readings come from, ``groups`` finds the memory cgroups,
``limits`` lists every bound, ``pressure`` measures stalls, ``request`` reads what
the user asked, ``budget`` joins them, ``watcher`` looks again while a step runs.
"""

from daf.governor.budget import Governor, Reading
from daf.governor.limits import (
    Bound,
    Limits,
    bounds_of,
    cgroup_limit_bytes,
    headroom_bytes,
    read_bounds,
    read_limits,
    room_bytes,
)
from daf.governor.pressure import open_triggers
from daf.governor.request import AUTO, Budget, BudgetValue, Request, parse_budget
from daf.governor.system import THIS_SYSTEM, System
from daf.governor.watcher import Watcher

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
