"""Live limits to today's budget: what the user set, and what the system lets this process hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_SELF_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63.
_NO_LIMIT_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds this process now (bytes); None where nothing does."""

    cgroup_limit_bytes: int | None
    available_bytes: int
    total_bytes: int


def read_limits() -> Limits:
    """Read the memory cgroup (v1 or v2) of this process and the machine's free memory."""
    memory = psutil.virtual_memory()
    return Limits(cgroup_limit_bytes(), int(memory.available), int(memory.total))


def headroom_bytes() -> int:
    """How much more this process may take now: free memory, or what its cgroup leaves it."""
    limits = read_limits()
    if limits.cgroup_limit_bytes is None:
        return limits.available_bytes
    used = int(psutil.Process().memory_info().rss)
    return min(limits.available_bytes, limits.cgroup_limit_bytes - used)


def cgroup_limit_bytes() -> int | None:
    """The least limit set on this process's memory cgroup or one above it; None without one."""
    limits = [limit for path in _limit_files() if (limit := _read_limit(path)) is not None]
    return min(limits, default=None)


def _limit_files() -> list[Path]:
    try:
        lines = _SELF_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files += _ancestors(_CGROUP_ROOT, path, "memory.max")
        elif "memory" in controllers.split(","):
            files += _ancestors(_CGROUP_ROOT / "memory", path, "memory.limit_in_bytes")
    return files


def _ancestors(root: Path, path: str, name: str) -> list[Path]:
    group = root / path.lstrip("/")
    return [level / name for level in (group, *group.parents) if level.is_relative_to(root)]


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None


def todays_budget(asked_bytes: int) -> tuple[int, str]:
    """The budget in force (bytes) and why: the user's, or a tighter memory cgroup's."""
    limit = cgroup_limit_bytes()
    if limit is not None and limit < asked_bytes:
        return limit, "the memory cgroup's limit"
    return asked_bytes, "as asked"
