"""Memory statistics for any PyTorch program on the CPU, by one ``with`` around it.

with daf.memory.track() as tracking:
    train()
print(tracking.peak_bytes)
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from daf._native import allocator as native
from daf.core.units import parse_optional_bytes
from daf.memory.history import History
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import PeakWatch, stats


class Tracking(PeakWatch):
    """The result of ``track``: final ``statistics``, and ``history`` if it was asked."""

    def __init__(self, history: History | None = None) -> None:
        super().__init__()
        self.statistics: dict[str, int] = {}
        self.history = history


STEP_EVENTS = 50_000  # the most of one step's record, at about 100 bytes each


@contextmanager
def recorded(model: nn.Module) -> Iterator[History]:
    """Record inside, under the installed allocator, else its own (PlatformError if unsupported)."""
    allocator = nullcontext() if native.is_installed() else RecyclingAllocator()
    with allocator, History(model, capacity=STEP_EVENTS) as history:
        yield history


@contextmanager
def track(
    *,
    limit: str | int | None = None,
    cap: str | int | None = None,
    history: bool = False,
    model: nn.Module | None = None,
) -> Iterator[Tracking]:
    """Count, and if asked bound and record, PyTorch's CPU memory inside the block.

    Args:
        limit: the most that tensors may hold, as ``"1.5GB"`` or an int; default: no limit.
        cap: the most that freed blocks may hold for reuse; default: no cap.
        history: record every allocation with its module and operator.
        model: gives recorded modules their full paths.

    Raises:
        PlatformError: allocations cannot be redirected on this system.
        UnitError: ``limit`` or ``cap`` cannot be parsed.
    """
    allocator = RecyclingAllocator(
        cap_bytes=parse_optional_bytes(cap), limit_bytes=parse_optional_bytes(limit)
    )
    tracking = Tracking(History(model) if history else None)
    with allocator, tracking, tracking.history or nullcontext():
        try:
            yield tracking
        finally:
            tracking.statistics = stats() | {"live_bytes.peak": tracking.peak_bytes}
