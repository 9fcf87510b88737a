"""Every limit on this process's memory now, except the user's, with what it leaves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daf.budget.cgroups import MemoryGroup, memory_groups
from daf.budget.system import THIS_SYSTEM, System
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import MemoryDomain

# Steps of a convolutional net are 20 to 100 times slower where a cgroup leaves less to libraries'
# code, cached pages included, of which 33 MB are mapped.
CACHED_CODE_BYTES = 96 * 2**20
_RLIMITS = (("RLIMIT_AS", "VmSize", "ulimit -v"), ("RLIMIT_DATA", "VmData", "ulimit -d"))


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit on this process (bytes).

    ``ceiling_bytes``: the limit. ``most_bytes``: what this process may hold if all others stay as
    they are, that is what it holds plus the room left. It may exceed the ceiling (shared pages
    are often charged to others) or lie below what is held.
    """

    name: str
    ceiling_bytes: int
    most_bytes: int


def cgroup_limit_bytes(system: System = THIS_SYSTEM) -> int | None:
    """Return the least limit of this process's memory cgroup and its ancestors; None: no limit."""
    limits = [limit for each in memory_groups(system) for limit in each.limits(system).values()]
    return min(limits, default=None)


def code_bytes(budget_bytes: float, system: System = THIS_SYSTEM) -> int:
    """Return the least bytes of a budget to leave to code, where a cgroup's limit is near it."""
    limit_bytes = cgroup_limit_bytes(system)
    room_bytes = math.inf if limit_bytes is None else limit_bytes - budget_bytes
    return int(max(0, CACHED_CODE_BYTES - max(0, room_bytes)))


def headroom_bytes(system: System = THIS_SYSTEM) -> int:
    """Return how many more bytes this process may take now; 0 beyond a bound."""
    own_bytes = system.process()["VmRSS"]
    return max(0, min(each.most_bytes for each in read_bounds(system)) - own_bytes)


def read_bounds(
    system: System = THIS_SYSTEM,
    near_bytes: int | None = None,
    groups: Sequence[MemoryGroup] | None = None,
) -> tuple[Bound, ...]:
    """Return every bound that the operating system sets, free memory included.

    ``near_bytes``: skip reading page cache where a bound leaves this much without it; None: never
    skip. ``groups``: this process's memory cgroups, if known already.
    """
    process = system.process()
    own_bytes = process["VmRSS"]
    memory = system.machine()
    bounds = [Bound("free memory", memory["MemTotal"], own_bytes + memory["MemAvailable"])]
    for name, field, words in _RLIMITS:
        limit = system.rlimit(name)
        if limit is not None and field in process:
            bounds.append(Bound(words, limit, own_bytes + limit - process[field]))
    for group in memory_groups(system) if groups is None else groups:
        bounds += _group_bounds(system, group, own_bytes, near_bytes)
    return tuple(bounds)


def _group_bounds(
    system: System, group: MemoryGroup, own_bytes: int, near_bytes: int | None
) -> list[Bound]:
    limits = group.limits(system)
    used, room = group.used_bytes(system) if limits else None, 0
    if used is not None:
        room = own_bytes - used
        if near_bytes is None or min(limits.values()) + room < near_bytes:
            room += min(used, group.reclaimable_bytes(system))
    return [Bound(f"{group.path}/{name}", limit, limit + room) for name, limit in limits.items()]


def gpu_bound(
    memory_info: Callable[[], tuple[int, int]], own_bytes: Callable[[], int]
) -> tuple[Bound, ...]:
    """Return a GPU's bound from ``torch.cuda.mem_get_info`` and ``memory_reserved``, or alike."""
    own, (free, total), after = own_bytes(), memory_info(), own_bytes()
    while own != after:  # another thread of this process grew in between: not others' growth
        own, (free, total), after = after, memory_info(), own_bytes()
    return (Bound("free GPU memory", total, own + free),)


def bounds_of(memory: MemoryDomain) -> Callable[[], tuple[Bound, ...]] | None:
    """Return a reader of a device's bounds; None for the process's own (``read_bounds``)."""
    if not isinstance(memory, DeviceMemory):
        return None
    return lambda: gpu_bound(memory.free_and_total_bytes, memory.held_bytes)


def room_bytes(memory: MemoryDomain) -> int:
    """Return how many more bytes of this memory may be taken now."""
    if isinstance(memory, DeviceMemory):
        return memory.free_and_total_bytes()[0]
    return headroom_bytes()
