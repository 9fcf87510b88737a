"""The process's memory: measuring it, counting it, recycling it and bounding it.

``stats``, ``snapshot``, ``track`` and ``phase`` are of use to anybody who
trains with PyTorch on the CPU; see docs/allocator.md.
"""

from daf.memory.history import History
from daf.memory.recycling import RecyclingAllocator
from daf.memory.statistics import audit, phase, reset_peaks, snapshot, stats
from daf.memory.tracking import track

__all__ = [
    "History",
    "RecyclingAllocator",
    "audit",
    "phase",
    "reset_peaks",
    "snapshot",
    "stats",
    "track",
]
