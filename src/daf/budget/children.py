"""The memory of this process's children, which a budget of ``scope="tree"`` bounds too."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from daf.budget.system import System, kibibytes

# Pages that a forked child still shares with this process are this process's.
_OWN = ("Private_Clean", "Private_Dirty", "Swap")


def children_bytes(system: System) -> int:
    """Return the bytes that only children, and theirs, hold, resident or swapped out."""
    if system.read("/proc/self/smaps_rollup") is None:
        return sum(_unique_bytes(each) for each in psutil.Process().children(recursive=True))
    found = (system.read(f"/proc/{pid}/smaps_rollup") for pid in _descendants(system, "self"))
    return sum(sum(kibibytes(text, _OWN).values()) for text in found)


def _descendants(system: System, pid: str) -> Iterator[str]:
    try:
        threads = [each.name for each in system.place(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return  # it has ended
    for thread in threads:
        for child in (system.read(f"/proc/{pid}/task/{thread}/children") or "").split():
            yield child
            yield from _descendants(system, child)


def _unique_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0  # it has ended, or is another user's
