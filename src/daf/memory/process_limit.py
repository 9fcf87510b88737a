"""What is set in the process while a budget is in force, and undone afterwards.

Where PyTorch's allocations can be redirected, freed blocks are recycled and a
hard limit makes an allocation beyond the budget an error instead of a breach
(``recycling``). Blocks too small for that, and everything on other systems
with glibc, are returned to the system as soon as they are freed (``allocator``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from daf.core.units import format_bytes
from daf.memory import glibc, process_memory
from daf.memory.limit_protocol import GiveBack
from daf.memory.recycling_allocator import RecyclingAllocator, limit_for_process, unsupported_reason
from daf.memory.statistics import stats

# What the process may grow by beside the account during one step: Python's own objects, kernels
# that oneDNN generates for new shapes.
SPARE_FRACTION = 0.0025
SPARE_BYTES = 6 * 2**20
# Of which so much stays free when that grew further: for what comes until it is looked at again.
LEAST_SPARE_BYTES = 4 * 2**20
# Closer to the limit than this, what grows beside the account matters within milliseconds.
NEAR_BYTES = 16 * 2**20

# One account serves the whole process, so one lock does. It is taken across a fork, or a child
# could find it held by a thread that it does not have.
account_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=account_lock.acquire,
        after_in_parent=account_lock.release,
        after_in_child=account_lock.release,
    )


class MemoryKeeper:
    """Open it before a budgeted job; ``close`` undoes what ``settings`` states (``keeping``).

    ``give_back`` is asked to return at least so many bytes of other memory in
    the account (the pool's) once the limit is reached; it returns how many it did.
    """

    def __init__(self, give_back: GiveBack = lambda _: 0) -> None:
        self._give_back = give_back
        self.settings: list[str] = []
        self._resources = ExitStack()
        self._recycling: RecyclingAllocator | None = None
        self._limit_bytes: int | None = None
        self._hard_limit_bytes = 0
        self._budget_bytes = 0
        self._unbounded = 0
        # Beside the usual, while something runs for the first time.
        self.spare_more_bytes = 0
        # How far beyond the limit the allocation lay that was refused last.
        self.missing_bytes = 0
        # A step that has begun to change parameters is finished, at this cost beyond the budget.
        self.overrun_bytes = 0
        self._must_finish = False

    @property
    def recycles(self) -> bool:
        """Whether freed blocks are recycled under a hard limit."""
        return self._recycling is not None

    @property
    def can_refuse(self) -> bool:
        """Whether allocations can be refused on this system."""
        return unsupported_reason() is None

    def open(self) -> None:
        """Set what this system offers; does nothing when it is set already."""
        if self.settings:
            return
        if self.can_refuse:
            recycling = RecyclingAllocator(reclaim=self._make_room)
            self._recycling = self._resources.enter_context(recycling)
            self.settings.append(
                "PyTorch's CPU blocks of 128 KiB and more are recycled, with the budget as a limit"
            )
        if self._resources.enter_context(glibc.ReturnFreedBlocks()).active:
            size = format_bytes(glibc.RETURN_BLOCKS_FROM_BYTES)
            self.settings.append(f"glibc returns other freed blocks of {size} and more at once")

    def close(self) -> None:
        """Undo everything; blocks that live on stay valid."""
        with account_lock:
            self._resources.close()
            self._recycling = None
            self._limit_bytes = None
        self.settings.clear()

    def flush(self) -> None:
        """Give everything that is free back to the system now."""
        self._give_back(0)
        if self._recycling is not None:
            self._recycling.trim()
        glibc.return_free_memory()

    def refusals(self) -> int:
        """Allocations that the limit has refused in this process so far."""
        return stats()["refusals"] if self._recycling is not None else 0

    def has_refused(self, error: BaseException, refusals_before: int) -> bool:  # noqa: ARG002
        """Was memory refused since ``refusals`` was so many? The user's own code may have made
        any other error of that.
        """
        return self.refusals() > refusals_before

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:
        """From now on the process stays within ``budget_bytes``: further allocations are refused.

        Up to ``expected_bytes`` freed blocks are kept for reuse; beyond it they
        go back to the system first. Does nothing where nothing is recycled.
        """
        with account_lock:
            if self._recycling is None:
                return
            self._recycling.refresh()
            self.overrun_bytes = 0
            self._must_finish = False
            self._budget_bytes = budget_bytes
            self._hard_limit_bytes = self._limit_bytes = self._hard_limit_of(budget_bytes)
            self.expect(expected_bytes)

    def expect(self, expected_bytes: int) -> None:
        """From now on freed blocks are kept up to this; the bound stays. Nothing without one."""
        with account_lock:
            if self._recycling is None or self._limit_bytes is None:
                return
            expected = _account_limit(expected_bytes, self._budget_bytes)
            self._limit_bytes = min(expected, self._hard_limit_bytes)
            self._apply()

    def follow_growth(self) -> bool:
        """Take off the limit what the rest of the process grew by beyond what was spared for it.

        Called now and then from another thread. What glibc keeps between small blocks goes back
        to the system first. A refused step is tried again under a tighter plan; a budget that is
        passed is broken.

        Returns:
            Whether the limit is near, so that another look should come soon.
        """
        with account_lock:
            if self._recycling is None or self._limit_bytes is None or self._unbounded:
                return False
            if self._overgrown_bytes() > 0:
                glibc.return_free_memory()
            over_bytes = 0 if self._must_finish else self._overgrown_bytes()
            if over_bytes > 0:
                self._hard_limit_bytes = max(0, self._hard_limit_bytes - over_bytes)
                self._limit_bytes = min(self._limit_bytes, self._hard_limit_bytes)
                self._apply()
            return stats()["held_bytes.current"] > self._hard_limit_bytes - NEAR_BYTES

    def _hard_limit_of(self, budget_bytes: int) -> int:
        return max(0, _account_limit(budget_bytes, budget_bytes) - self.spare_more_bytes)

    def _overgrown_bytes(self) -> int:
        """By how much the process would pass its budget if all of the limit were used; 0 if not
        known: what is given to the account meanwhile would look like the others' growth.
        """
        held_bytes = stats()["held_bytes.current"]
        limit_bytes = limit_for_process(self._budget_bytes, LEAST_SPARE_BYTES)
        is_quiet = stats()["held_bytes.current"] == held_bytes
        return max(0, self._hard_limit_bytes - limit_bytes) if is_quiet else 0

    def rebound(self, budget_bytes: int | None) -> int:
        """Another budget in the midst of a step: acts at once, from any thread.

        A lower one gives recycled blocks back, then whatever ``give_back``
        finds until the process is within it, and refuses what is asked beyond;
        a higher one, or None, lets the step have more. What is alive stays valid.

        Returns:
            Bytes that ``give_back`` returned.
        """
        with account_lock:
            if budget_bytes is None:
                self._limit_bytes = None
                self._apply()
                return 0
            over_bytes = process_memory.resident_bytes() - budget_bytes
            if self._recycling is not None and self._limit_bytes is not None:
                self._budget_bytes = budget_bytes
                self._hard_limit_bytes = self._hard_limit_of(budget_bytes)
                self._limit_bytes = min(self._limit_bytes, self._hard_limit_bytes)
                self._apply()
                over_bytes = stats()["held_bytes.current"] - self._hard_limit_bytes
            return self._give_back(over_bytes) if over_bytes > 0 else 0

    def must_finish(self) -> None:
        """Until ``bound`` is called again nothing is refused: all that can be given back goes
        first, and what is still missing is counted in ``overrun_bytes``.
        """
        self._must_finish = True

    @contextmanager
    def unbounded(self, needed_bytes: int = 0) -> Iterator[None]:  # noqa: ARG002 - of its kind
        """No limit inside, for what must not fail half-way: the optimizer's step.

        Recycled blocks are given another size where they do not fit, so that nothing needs to go
        first.
        """
        self._change_unbounded(1)
        try:
            yield
        finally:
            self._change_unbounded(-1)

    def _change_unbounded(self, by: int) -> None:
        with account_lock:
            self._unbounded += by
            self._apply()

    def _apply(self) -> None:
        if self._recycling is not None:
            self._recycling.limit_bytes = None if self._unbounded else self._limit_bytes

    def _make_room(self, missing_bytes: int) -> int:
        """What the allocator asks when the limit is reached with nothing left to give back."""
        with account_lock:
            if self._recycling is None or self._limit_bytes is None or self._unbounded:
                return 0
            if self._limit_bytes < self._hard_limit_bytes:
                self._limit_bytes = self._hard_limit_bytes
                self._apply()
                return missing_bytes
        returned = self._give_back(missing_bytes)
        if returned == 0 and self._must_finish:
            return self._overrun(missing_bytes)
        if returned == 0:
            self.missing_bytes = missing_bytes
        return returned

    def _overrun(self, missing_bytes: int) -> int:
        with account_lock:
            if self._limit_bytes is not None:
                self._limit_bytes += missing_bytes
                self.overrun_bytes += missing_bytes
                self._apply()
        return missing_bytes


def _account_limit(process_bytes: int, budget_bytes: int) -> int:
    spare = int(SPARE_FRACTION * budget_bytes) + SPARE_BYTES
    return limit_for_process(process_bytes, spare)
