"""The memory cgroups that this process is in, from its own up to the highest one in sight.

Both versions: v1's ``memory`` hierarchy and v2's unified one, alone or side by
side. Where they are mounted, and from which group on, says ``/proc/self/mountinfo``
(cgroups(7), and the kernel's cgroup-v1/memory.rst and cgroup-v2.rst).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from daf.budget.system import System

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63.
_NO_LIMIT_BYTES = 2**62
_DEFAULT_MOUNTS = {1: PurePosixPath("/sys/fs/cgroup/memory"), 2: PurePosixPath("/sys/fs/cgroup")}
_LIMIT_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USAGE_FILES = {1: "memory.usage_in_bytes", 2: "memory.current"}
# Of a v1 group, only the lines that begin with total_ count the groups below it too.
_PREFIXES = {1: "total_", 2: ""}


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One level of the hierarchy."""

    path: PurePosixPath
    version: int

    def limits(self, system: System) -> dict[str, int]:
        """The limits set here (bytes), by their files' names.

        ``memory.high`` counts as one: beyond it the kernel slows every member down.
        v1's soft limit does not: it only orders reclaim once the machine itself is short.
        """
        read = {name: _number(system.read(self.path / name)) for name in _LIMIT_FILES[self.version]}
        return {name: value for name, value in read.items() if value is not None}

    def used_bytes(self, system: System) -> int | None:
        """What all members hold, page cache included; None where it is not told."""
        return _number(system.read(self.path / _USAGE_FILES[self.version]))

    def reclaimable_bytes(self, system: System) -> int:
        """Page cache that nobody has mapped (and slab): the kernel takes it before anything else.

        Reading it costs more than the other files, so ask only where it matters.
        """
        counts = self._statistics(system)
        cache = counts.get("file", counts.get("cache", 0))
        mapped = counts.get("file_mapped", counts.get("mapped_file", 0))
        unmapped = max(0, cache - mapped - counts.get("shmem", 0))
        return unmapped + counts.get("slab_reclaimable", 0)

    def _statistics(self, system: System) -> dict[str, int]:
        prefix, found = _PREFIXES[self.version], {}
        for line in (system.read(self.path / "memory.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name.startswith(prefix) and value.isdigit():
                found[name.removeprefix(prefix)] = int(value)
        return found


def memory_groups(system: System) -> tuple[MemoryGroup, ...]:
    """This process's memory cgroup and those above it, innermost first; both versions."""
    mounts = _mounts(system)
    groups: list[MemoryGroup] = []
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version = 2
        elif "memory" in controllers.split(","):
            version = 1
        else:
            continue
        if version in mounts:
            groups += _levels(version, path, *mounts[version])
    return tuple(groups)


def _levels(version: int, path: str, mount: PurePosixPath, mounted: str) -> list[MemoryGroup]:
    """From the group at ``path`` up to the mount's top, which shows the group ``mounted``."""
    inside = _inside(path, mounted)
    group = mount / inside.lstrip("/")
    places = (group, *group.parents)
    return [MemoryGroup(each, version) for each in places if each.is_relative_to(mount)]


def _inside(path: str, mounted: str) -> str:
    """The group's path below the mount; its top where the group lies outside of what is shown."""
    if ".." in PurePosixPath(path).parts:
        return "/"
    if mounted == "/":
        return path
    if path == mounted or path.startswith(mounted + "/"):
        return path.removeprefix(mounted)
    return "/"


def _mounts(system: System) -> dict[int, tuple[PurePosixPath, str]]:
    """Per version where it is mounted and which group its top shows."""
    text = system.read("/proc/self/mountinfo")
    if text is None:
        return {version: (place, "/") for version, place in _DEFAULT_MOUNTS.items()}
    found: dict[int, tuple[PurePosixPath, str]] = {}
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(), "", "", ""][:3]
        version = _version(kind, options)
        if version is not None:
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
