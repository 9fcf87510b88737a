"""The process's memory: measured, counted, recycled and bounded (docs/allocator.md).

``stats``, ``snapshot``, ``track`` and ``phase`` serve any PyTorch program on the CPU.
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
