"""The source of readings of this machine; tests substitute their own /proc and /sys trees."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil

from daf.memory.process_memory import soft_limit_bytes

_KIB = 1024
# Pages that a forked child still shares with this process are this process's.
_OWN = ("Private_Clean", "Private_Dirty", "Swap")


@dataclass(frozen=True, slots=True)
class System:
    """A machine to read: its file tree from ``root``, and this process's resource limits."""

    root: Path = Path("/")
    rlimit: Callable[[str], int | None] = soft_limit_bytes

    def read(self, path: str | PurePath) -> str | None:
        """Return the text of a file; None if it cannot be read."""
        try:
            return self.place(path).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def place(self, path: str | PurePath) -> Path:
        """Return the real location of a path of the tree."""
        return self.root / str(path).lstrip("/")

    def process(self) -> dict[str, int]:
        """Return this process's ``VmRSS``, ``VmSize`` and ``VmData`` (bytes), where reported."""
        found = kibibytes(self.read("/proc/self/status"), ("VmRSS", "VmSize", "VmData"))
        if "VmRSS" not in found:
            found["VmRSS"] = int(psutil.Process().memory_info().rss)
        return found

    def machine(self) -> dict[str, int]:
        """Return the machine's ``MemTotal`` and ``MemAvailable`` (bytes)."""
        found = kibibytes(self.read("/proc/meminfo"), ("MemTotal", "MemAvailable"))
        if len(found) == 2:
            return found
        memory = psutil.virtual_memory()
        return {"MemTotal": int(memory.total), "MemAvailable": int(memory.available)}


def kibibytes(text: str | None, names: tuple[str, ...]) -> dict[str, int]:
    """Return the fields of these names (bytes) of a file of ``/proc`` that counts KiB."""
    found = {}
    for line in (text or "").splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            found[name] = int(rest.split()[0]) * _KIB
    return found


THIS_SYSTEM = System()


def children_bytes(system: System) -> int:
    """Return the bytes that only children, and theirs, hold: counted with ``scope="tree"``."""
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
