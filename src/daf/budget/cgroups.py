"""This process's memory cgroup and its ancestors, innermost first, of v1, v2 or both.

Sources: cgroups(7); the kernel's cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

from daf.budget.system import System

_NO_LIMIT_BYTES = 2**62  # v1 writes "no limit" as the largest multiple of pages below 2**63
_DEFAULT_MOUNTS = {1: PurePosixPath("/sys/fs/cgroup/memory"), 2: PurePosixPath("/sys/fs/cgroup")}
# v1's soft limit is none: it only orders reclaim once the machine itself is short.
_LIMIT_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USAGE_FILES = {1: "memory.usage_in_bytes", 2: "memory.current"}
_PREFIXES = {1: "total_", 2: ""}  # in a v1 group only the total_ lines include its descendants


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One memory cgroup."""

    path: PurePosixPath
    version: int

    def limits(self, system: System) -> dict[str, int]:
        """Return the limits (bytes) by file name; ``memory.high``, which throttles, counts too."""
        read = {name: _number(system.read(self.path / name)) for name in _LIMIT_FILES[self.version]}
        return {name: value for name, value in read.items() if value is not None}

    def limits_children(self, system: System) -> bool:
        """True if groups below this one can have memory limits."""
        return self.version == 1 or system.read(self.path / "memory.max") is not None

    def used_bytes(self, system: System) -> int | None:
        """Return the bytes of all members, page cache included; None if not readable."""
        return _number(system.read(self.path / _USAGE_FILES[self.version]))

    def reclaimable_bytes(self, system: System) -> int:
        """Return unmapped page cache and reclaimable slab (bytes), taken first; slow to read."""
        counts = self._counts(system)
        cache = counts.get("file", counts.get("cache", 0))
        mapped = counts.get("file_mapped", counts.get("mapped_file", 0))
        return max(0, cache - mapped - counts.get("shmem", 0)) + counts.get("slab_reclaimable", 0)

    def _counts(self, system: System) -> dict[str, int]:
        prefix, counts = _PREFIXES[self.version], dict[str, int]()
        for line in (system.read(self.path / "memory.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name.startswith(prefix) and value.isdigit():
                counts[name.removeprefix(prefix)] = int(value)
        return counts


def memory_groups(system: System) -> tuple[MemoryGroup, ...]:
    """Return this process's memory cgroup and its ancestors, innermost first, of both versions."""
    mounts = _mounts(system)
    groups: list[MemoryGroup] = []
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        version = _version("cgroup" if controllers else "cgroup2", controllers)
        if version in mounts:
            groups += _levels(version, path, *mounts[version])
    return tuple(groups)


def _levels(version: int, path: str, mount: PurePosixPath, mounted: str) -> list[MemoryGroup]:
    """Return the groups from ``path`` up to the mount's top, which shows the group ``mounted``."""
    own = PurePosixPath(path)
    is_inside = ".." not in own.parts and own.is_relative_to(mounted)
    group = mount / own.relative_to(mounted) if is_inside else mount
    places = (group, *group.parents)
    return [MemoryGroup(each, version) for each in places if each.is_relative_to(mount)]


def _mounts(system: System) -> dict[int, tuple[PurePosixPath, str]]:
    if (text := system.read("/proc/self/mountinfo")) is None:
        return {version: (place, "/") for version, place in _DEFAULT_MOUNTS.items()}
    found: dict[int, tuple[PurePosixPath, str]] = {}
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(), "", "", ""][:3]
        if (version := _version(kind, options)) is not None:
            top, place = fields.split()[3:5]
            found.setdefault(version, (PurePosixPath(place), top))
    return found


def _version(kind: str, options: str) -> int | None:
    if kind == "cgroup2":
        return 2
    return 1 if kind == "cgroup" and "memory" in options.split(",") else None


def _number(text: str | None) -> int | None:
    text = "" if text is None else text.strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None
