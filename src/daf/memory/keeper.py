"""What is set in the process while a budget is in force, and undone afterwards.

Where PyTorch's allocations can be redirected, freed blocks are recycled and a
hard limit makes an allocation beyond the budget an error instead of a breach
(``recycling``). Blocks too small for that, and everything on other systems
with glibc, are returned to the system as soon as they are freed (``allocator``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from daf.memory import allocator
from daf.memory.recycling import RecyclingAllocator, limit_for_process, unsupported_reason
from daf.memory.statistics import stats
from daf.units import format_bytes

# What the process may grow by beside the account during one step: Python's own objects, kernels
# that oneDNN generates for new shapes.
SPARE_FRACTION = 0.01
SPARE_BYTES = 4 * 2**20


class MemoryKeeper:
    """Enter it before a budgeted job; ``close`` undoes what ``settings`` states.

    ``give_back`` is asked to return at least so many bytes of other memory in
    the account (the pool's) once the limit is reached; it returns how many it did.
    """

    def __init__(self, give_back: Callable[[int], int] = lambda _: 0) -> None:
        self._give_back = give_back
        self.settings: list[str] = []
        self._resources = ExitStack()
        self._recycling: RecyclingAllocator | None = None
        self._hard_limit_bytes = 0
        # How far beyond the limit the allocation lay that was refused last.
        self.missing_bytes = 0
        # A step that has begun to change parameters is finished, at this cost beyond the budget.
        self.overrun_bytes = 0
        self._must_finish = False

    @property
    def recycles(self) -> bool:
        """Whether freed blocks are recycled under a hard limit."""
        return self._recycling is not None

    def open(self) -> None:
        """Set what this system offers; does nothing when it is set already."""
        if self.settings:
            return
        if unsupported_reason() is None:
            recycling = RecyclingAllocator(reclaim=self._make_room)
            self._recycling = self._resources.enter_context(recycling)
            self.settings.append(
                "PyTorch's CPU blocks of 1 MiB and more are recycled, within the budget as a limit"
            )
        if self._resources.enter_context(allocator.ReturnFreedBlocks()).active:
            size = format_bytes(allocator.RETURN_BLOCKS_FROM_BYTES)
            self.settings.append(f"glibc returns other freed blocks of {size} and more at once")

    def close(self) -> None:
        """Undo everything; blocks that live on stay valid."""
        self._resources.close()
        self._recycling = None
        self.settings.clear()

    def flush(self) -> None:
        """Give everything that is free back to the system now."""
        self._give_back(0)
        if self._recycling is not None:
            self._recycling.trim()
        allocator.return_free_memory()

    def refusals(self) -> int:
        """Allocations that the limit has refused in this process so far."""
        return stats()["refusals"] if self._recycling is not None else 0

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:
        """From now on the process stays within ``budget_bytes``: further allocations are refused.

        Up to ``expected_bytes`` freed blocks are kept for reuse; beyond it they
        go back to the system first. Does nothing where nothing is recycled.
        """
        if self._recycling is None:
            return
        self._recycling.refresh()
        self.overrun_bytes = 0
        self._must_finish = False
        spare = int(SPARE_FRACTION * budget_bytes) + SPARE_BYTES
        self._hard_limit_bytes = limit_for_process(budget_bytes, spare)
        expected = limit_for_process(expected_bytes, spare)
        self._recycling.limit_bytes = min(expected, self._hard_limit_bytes)

    def must_finish(self) -> None:
        """Until ``bound`` is called again nothing is refused: all that can be given back goes
        first, and what is still missing is counted in ``overrun_bytes``.
        """
        self._must_finish = True

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """No limit inside, for what must not fail half-way: the optimizer's step."""
        if self._recycling is None:
            yield
            return
        before = self._recycling.limit_bytes
        self._recycling.limit_bytes = None
        try:
            yield
        finally:
            self._recycling.limit_bytes = before

    def _make_room(self, missing_bytes: int) -> int:
        """What the allocator asks when the limit is reached with nothing left to give back."""
        recycling = self._recycling
        limit = None if recycling is None else recycling.limit_bytes
        if recycling is None or limit is None:
            return 0
        if limit < self._hard_limit_bytes:
            recycling.limit_bytes = self._hard_limit_bytes
            return missing_bytes
        returned = self._give_back(missing_bytes)
        if returned == 0 and self._must_finish:
            recycling.limit_bytes = limit + missing_bytes
            self.overrun_bytes += missing_bytes
            return missing_bytes
        if returned == 0:
            self.missing_bytes = missing_bytes
        return returned
