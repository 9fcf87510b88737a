"""The process's memory: measured, counted, recycled and bounded (docs/allocator.md).

``stats``, ``snapshot`` and ``track`` serve any PyTorch program on the CPU.
"""

from daf.memory.allocation_log import track
from daf.memory.history import History, snapshot
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import audit, reset_peaks, stats

__all__ = ["History", "RecyclingAllocator", "audit", "reset_peaks", "snapshot", "stats", "track"]
