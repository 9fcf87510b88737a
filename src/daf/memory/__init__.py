"""The process's memory: measuring it, counting it, recycling it and bounding it.

``stats``, ``snapshot``, ``track`` and ``phase`` are of use to anybody who
trains with PyTorch on the CPU; see docs/allocator.md.
"""

from daf.memory.allocation_log import track
from daf.memory.history import History
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import audit, phase, reset_peaks, snapshot, stats

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
