"""Memory statistics for any PyTorch program on the CPU, one ``with`` around it.

with daf.memory.track() as tracking:
    train()
print(tracking.peak_bytes)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import nn

from daf._native import allocator as native
from daf.core.units import parse_bytes
from daf.memory.history import History
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import reset_peaks, stats


@dataclass(slots=True)
class Tracking:
    """What ``track`` saw: ``statistics`` once the block is left, ``history`` where it was asked."""

    statistics: dict[str, int] = field(default_factory=dict)
    history: History | None = None

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that were live at once."""
        return (self.statistics or stats())["live_bytes.peak"]


# What one step's record may take beside the account: some 100 bytes an event.
STEP_EVENTS = 50_000


@contextmanager
def recorded(model: nn.Module) -> Iterator[History]:
    """Record inside, under the allocator that is installed, or under one of its own.

    Raises:
        PlatformError: allocations cannot be redirected on this system.
    """
    with ExitStack() as stack:
        if not native.is_installed():
            stack.enter_context(RecyclingAllocator())
        yield stack.enter_context(History(model, capacity=STEP_EVENTS))


@contextmanager
def track(
    *,
    limit: str | int | None = None,
    cap: str | int | None = None,
    history: bool = False,
    model: nn.Module | None = None,
) -> Iterator[Tracking]:
    """Count (and, if asked, bound and record) PyTorch's CPU memory inside the block.

    Args:
        limit: the most that tensors may hold, as ``"1.5GB"`` or an int.
        cap: the most that freed blocks may hold for reuse.
        history: record every allocation with the module and operator that asked.
        model: gives the recorded modules their full paths.

    Raises:
        PlatformError: allocations cannot be redirected on this system.
        UnitError: limit or cap cannot be read.
    """
    allocator = RecyclingAllocator(
        cap_bytes=None if cap is None else parse_bytes(cap),
        limit_bytes=None if limit is None else parse_bytes(limit),
    )
    tracking = Tracking(history=History(model) if history else None)
    with ExitStack() as stack:
        stack.enter_context(allocator)
        reset_peaks()
        if tracking.history is not None:
            stack.enter_context(tracking.history)
        try:
            yield tracking
        finally:
            tracking.statistics = stats()
