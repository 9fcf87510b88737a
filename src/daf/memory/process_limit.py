"""The settings of the process while a budget is in force.

Where PyTorch's allocations can be redirected, freed blocks are recycled under a hard limit
(``recycling_allocator``). Smaller blocks, and all blocks on other systems with glibc, return to the
system once freed (``glibc``).
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

from daf._native import allocator as native
from daf.core.units import format_bytes
from daf.memory import glibc, process_memory
from daf.memory.keeper import GiveBack, Keeper
from daf.memory.recycling_allocator import RecyclingAllocator, limit_for_process, unsupported_reason
from daf.memory.statistics import audit, stats

# What may grow beside the account during one step: Python objects, code that oneDNN generates.
SPARE_FRACTION = 0.0025
SPARE_BYTES = 6 * 2**20
LEAST_SPARE_BYTES = 4 * 2**20  # of it, kept free when that grew further, until the next look
NEAR_BYTES = 16 * 2**20  # from the limit: here growth beside the account matters within ms

# One lock for the process's one account. A fork takes it, or the child could find it held by a
# thread that it does not have.
account_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=account_lock.acquire,
        after_in_parent=account_lock.release,
        after_in_child=account_lock.release,
    )


class MemoryKeeper(Keeper):
    """Keeps the process within a budget."""

    def __init__(self, give_back: GiveBack = lambda _: 0) -> None:
        super().__init__(give_back, account_lock)
        self._resources = ExitStack()
        self._recycling: RecyclingAllocator | None = None
        self._hard_limit_bytes = 0
        self._budget_bytes = 0
        self._overrun_bytes = 0
        self._used_bytes = 0  # when ``begin_need`` was called

    @property
    def overrun_bytes(self) -> int:
        return self._overrun_bytes

    @property
    def recycles(self) -> bool:
        return self._recycling is not None

    @property
    def can_refuse(self) -> bool:
        return unsupported_reason() is None

    @property
    def can_reserve(self) -> bool:
        return self.recycles

    def begin_need(self) -> None:
        _, self._used_bytes = native.take_watermark()

    def need_bytes(self) -> int:
        most_bytes, _ = native.take_watermark()
        return max(0, int(most_bytes) - self._used_bytes)

    def _reserve(self, needed_bytes: int) -> None:
        with account_lock:
            if self._recycling is None or self._limit_bytes is None:
                return
            _, used_bytes = native.take_watermark()
            missing_bytes = int(used_bytes) + needed_bytes - self._hard_limit_bytes
        if missing_bytes <= 0 or self._give_back(missing_bytes) >= missing_bytes:
            return
        self.missing_bytes = missing_bytes
        native.count_refusal()
        raise RuntimeError(
            f"asked for room for the rest of a step, {format_bytes(needed_bytes)}, before its "
            f"first update; {format_bytes(missing_bytes)} are missing"
        )

    def open(self) -> None:
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
        with account_lock:
            self._resources.close()
            self._recycling = None
            self._limit_bytes = None
        self.settings.clear()

    def flush(self) -> None:
        self._give_back(0)
        if self._recycling is not None:
            self._recycling.trim()
        glibc.return_free_memory()

    def refusals(self) -> int:
        return stats()["refusals"] if self._recycling is not None else 0

    def has_refused(self, error: BaseException, refusals_before: int) -> bool:  # noqa: ARG002
        """True if memory was refused since, because user code may turn a refusal into any error."""
        return self.refusals() > refusals_before

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:
        """Refuse what would pass the budget; keep freed blocks up to ``expected_bytes``."""
        with account_lock:
            if self._recycling is None:
                return
            self._recycling.refresh()
            self._overrun_bytes = 0
            self._must_finish = False
            self._budget_bytes = budget_bytes
            self._hard_limit_bytes = self._limit_bytes = self._hard_limit_of(budget_bytes)
            self.expect(expected_bytes)

    def expect(self, expected_bytes: int) -> None:
        """Keep freed blocks up to this; the bound stays. Does nothing without one."""
        with account_lock:
            if self._recycling is None or self._limit_bytes is None:
                return
            expected = _account_limit(expected_bytes, self._budget_bytes)
            self._limit_bytes = min(expected, self._hard_limit_bytes)
            self._apply()

    def follow_growth(self) -> bool:
        """Lower the limit by what the rest of the process grew beyond its spare; True if near.

        Called periodically from another thread. glibc's free small blocks are returned first. The
        limit falls because a refused step can be retried, while an exceeded budget is broken.
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
        """Return the bytes over budget if the limit were used up; 0 if the account just changed."""
        held_bytes = stats()["held_bytes.current"]
        limit_bytes = limit_for_process(self._budget_bytes, LEAST_SPARE_BYTES)
        is_quiet = stats()["held_bytes.current"] == held_bytes
        return max(0, self._hard_limit_bytes - limit_bytes) if is_quiet else 0

    def rebound(self, budget_bytes: int | None) -> int:
        """Set another budget within a step, from any thread; return what ``give_back`` freed.

        A lower one frees recycled blocks, then calls ``give_back`` until the process is within it,
        and refuses what is asked beyond; a higher one, or None, grants the step more.
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

    def _apply(self) -> None:
        if self._recycling is not None:
            self._recycling.limit_bytes = None if self._unbounded else self._limit_bytes

    def _make_room(self, missing_bytes: int) -> int:
        """Free memory for the allocator, which is at its limit with nothing left to return."""
        with account_lock:
            if self._recycling is None or self._limit_bytes is None or self._unbounded:
                return 0
            if self._limit_bytes < self._hard_limit_bytes:
                self._limit_bytes = self._hard_limit_bytes
                self._apply()
                return missing_bytes
        returned = self._give_back(missing_bytes) or self._regained(missing_bytes)
        if returned == 0 and self._must_finish:
            return self._overrun(missing_bytes)
        if returned == 0:
            self.missing_bytes = missing_bytes
        return returned

    def _regained(self, missing_bytes: int) -> int:
        """Raise the limit by what the rest of the process gave back since, if that suffices."""
        with account_lock:
            if self._recycling is None or self._limit_bytes is None:
                return 0
            glibc.return_free_memory()
            # By pages, as blocks that are not written yet count as the account's.
            spare_bytes = _spare_bytes(self._budget_bytes) + self.spare_more_bytes
            hard_limit_bytes = self._budget_bytes - audit().rest_bytes - spare_bytes
            if hard_limit_bytes - self._hard_limit_bytes < missing_bytes:
                return 0
            self._hard_limit_bytes = self._limit_bytes = hard_limit_bytes
            self._apply()
            return missing_bytes

    def _overrun(self, missing_bytes: int) -> int:
        with account_lock:
            if self._limit_bytes is not None:
                self._limit_bytes += missing_bytes
                self._overrun_bytes += missing_bytes
                self._apply()
        return missing_bytes


def _account_limit(process_bytes: int, budget_bytes: int) -> int:
    return limit_for_process(process_bytes, _spare_bytes(budget_bytes))


def _spare_bytes(budget_bytes: int) -> int:
    return int(SPARE_FRACTION * budget_bytes) + SPARE_BYTES
