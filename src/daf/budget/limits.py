"""What bounds this process's memory now, besides its user: every bound with what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daf.budget.cgroups import MemoryGroup, memory_groups
from daf.budget.system import THIS_SYSTEM, System
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import MemoryDomain

_RLIMITS = (("RLIMIT_AS", "VmSize", "ulimit -v"), ("RLIMIT_DATA", "VmData", "ulimit -d"))


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that bounds this process (bytes).

    ``ceiling_bytes`` is where the limit is set. ``most_bytes`` is what this
    process may hold if everybody else stays as they are: what it holds now and
    the room that is left. It may lie above the ceiling (pages of shared files
    are often charged to somebody else) and below what is held now.
    """

    name: str
    ceiling_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine and the tightest memory cgroup (bytes); None where no cgroup sets a limit."""

    cgroup_limit_bytes: int | None
    available_bytes: int
    total_bytes: int


def read_limits(system: System = THIS_SYSTEM) -> Limits:
    """Read the memory cgroups (v1 and v2) of this process and the machine's memory."""
    memory = system.machine()
    return Limits(cgroup_limit_bytes(system), memory["MemAvailable"], memory["MemTotal"])


def cgroup_limit_bytes(system: System = THIS_SYSTEM) -> int | None:
    """The least limit set on this process's memory cgroup or one above it; None without one."""
    limits = [limit for each in memory_groups(system) for limit in each.limits(system).values()]
    return min(limits, default=None)


def headroom_bytes(system: System = THIS_SYSTEM) -> int:
    """How much more this process may take now, by the tightest bound; 0 where it is beyond one."""
    own_bytes = system.process()["VmRSS"]
    return max(0, min(each.most_bytes for each in read_bounds(system)) - own_bytes)


def read_bounds(
    system: System = THIS_SYSTEM,
    near_bytes: int | None = None,
    groups: Sequence[MemoryGroup] | None = None,
) -> tuple[Bound, ...]:
    """Every bound that the operating system sets, the machine's free memory among them.

    Args:
        system: where to read.
        near_bytes: bounds that leave at least this much without counting reclaimable page
            cache are left so, which saves reading it; None: it is always counted.
        groups: this process's memory cgroups, where they are known already.
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
    used = group.used_bytes(system) if limits else None
    if used is None:
        return [Bound(f"{group.path}/{name}", limit, limit) for name, limit in limits.items()]
    room = own_bytes - used
    if near_bytes is None or min(limits.values()) + room < near_bytes:
        room += min(used, group.reclaimable_bytes(system))
    return [Bound(f"{group.path}/{name}", limit, limit + room) for name, limit in limits.items()]


def gpu_bound(
    memory_info: Callable[[], tuple[int, int]], own_bytes: Callable[[], int]
) -> tuple[Bound, ...]:
    """The bound of one GPU: what this process holds there and what is free.

    Args:
        memory_info: free and total bytes, as ``torch.cuda.mem_get_info`` returns them.
        own_bytes: what this process has reserved there, as ``torch.cuda.memory_reserved`` does.
    """
    own, (free, total), after = own_bytes(), memory_info(), own_bytes()
    while own != after:  # it grew in between, on another thread: that is nobody else's growth
        own, (free, total), after = after, memory_info(), own_bytes()
    return (Bound("free GPU memory", total, own + free),)


def bounds_of(memory: MemoryDomain) -> Callable[[], tuple[Bound, ...]] | None:
    """What reads the bounds of a device's memory; None for the process's own (``read_bounds``)."""
    if not isinstance(memory, DeviceMemory):
        return None
    return lambda: gpu_bound(memory.free_and_total_bytes, memory.held_bytes)


def room_bytes(memory: MemoryDomain) -> int:
    """How much more of this memory may be taken now, by the tightest bound."""
    if isinstance(memory, DeviceMemory):
        return memory.free_and_total_bytes()[0]
    return headroom_bytes()
