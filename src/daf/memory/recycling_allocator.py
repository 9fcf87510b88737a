"""A CPU allocator that knows its budget, under PyTorch while it is entered (docs/allocator.md).

Freed blocks of 128 KiB and more are reused, which saves the kernel's page faults.

    with RecyclingAllocator(limit_bytes=10**9) as allocator:
        train()
        allocator.cap_bytes = 64 * 2**20  # acts at once
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

from daf._native import allocator as native
from daf.core.errors import PlatformError
from daf.memory import process_memory

ReclaimHook = Callable[[int], int]


def unsupported_reason() -> str | None:
    """Return why this system cannot redirect PyTorch's allocations; None where it can."""
    return native.unsupported_reason() or None


class RecyclingAllocator:
    """Recycles, counts and bounds PyTorch's CPU memory while it is entered.

    One account serves the whole process: a nested allocator replaces cap, limit and hook until it
    is left. Leaving is always safe: surviving blocks stay valid and their owner frees them.

    Args:
        cap_bytes: the most that freed blocks may hold; None: no cap, so only the limit and the peak
            of live bytes bound them.
        limit_bytes: the most that live, recycled and charged bytes may hold together; None: no
            limit. At the limit an allocation frees recycled blocks, then calls ``reclaim``, then
            fails with PyTorch's ``RuntimeError`` ("can't allocate memory").
        reclaim: called with the missing bytes on the allocating thread; frees what it can and
            returns how many bytes that was.

    Raises:
        PlatformError: on entering, where allocations cannot be redirected.
        ValueError: a negative cap or limit.
    """

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        limit_bytes: int | None = None,
        reclaim: ReclaimHook | None = None,
    ) -> None:
        self._cap_bytes = _checked("cap", cap_bytes)
        self._limit_bytes = _checked("limit", limit_bytes)
        self._reclaim = reclaim
        self._before: tuple[int | None, int | None] = (None, None)
        self._hook_before: ReclaimHook | None = None
        self.active = False

    def __enter__(self) -> RecyclingAllocator:
        problem = native.unsupported_reason() or native.install()
        if problem:
            raise PlatformError(
                f"asked to recycle PyTorch's CPU memory; found: {problem}; "
                "without it, train as before or use daf.memory.glibc.ReturnFreedBlocks"
            )
        self.active = True
        self._before = native.settings()
        self._set(self._cap_bytes, self._limit_bytes)
        if self._reclaim is not None:
            self._hook_before = native.set_reclaim(self._reclaim)
            atexit.register(_clear_hook)  # threads may allocate while the interpreter exits
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.active:
            return
        self.active = False
        if self._reclaim is not None:
            native.set_reclaim(self._hook_before)
        self._set(*self._before)
        native.remove()

    @property
    def cap_bytes(self) -> int | None:
        """The most that freed blocks may hold; takes effect at once."""
        return self._cap_bytes

    @cap_bytes.setter
    def cap_bytes(self, value: int | None) -> None:
        self._cap_bytes = _checked("cap", value)
        if self.active:
            native.set_cap(value)

    @property
    def limit_bytes(self) -> int | None:
        """The most that the account may hold; recycled bytes beyond it are returned at once."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, value: int | None) -> None:
        self._limit_bytes = _checked("limit", value)
        if self.active:
            native.set_limit(value)

    def refresh(self) -> None:
        """Redirect libraries loaded since; about a microsecond when there are none."""
        native.refresh()

    @staticmethod
    def trim(wanted_bytes: int | None = None) -> int:
        """Return ``wanted_bytes`` or more recycled bytes (or all) to the system; return the sum."""
        return int(native.trim(wanted_bytes))

    @staticmethod
    def _set(cap_bytes: int | None, limit_bytes: int | None) -> None:
        native.set_cap(cap_bytes)
        native.set_limit(limit_bytes)


def limit_for_process(budget_bytes: int, spare_bytes: int = 0) -> int:
    """Return the account's limit: the budget minus the rest of the process and its spare, or 0."""
    held_bytes: int = native.statistics()["held_bytes.current"]
    other_bytes = process_memory.resident_bytes() - held_bytes
    return max(0, budget_bytes - other_bytes - spare_bytes)


def _checked(what: str, count: int | None) -> int | None:
    if count is not None and count < 0:
        raise ValueError(f"asked for a {what} of {count} bytes; give 0 or more, or None for none")
    return count


def _clear_hook() -> None:
    native.set_reclaim(None)
