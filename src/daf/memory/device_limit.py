"""The bound of a budget on a device: PyTorch's caching allocator itself refuses what is beyond.

Its limit is a share of the device (``set_per_process_memory_fraction``). Before it refuses,
it gives back what it keeps for reuse, so that a refusal means that the blocks in
use, and what lies between them, leave no room. It is PyTorch's ``OutOfMemoryError``, which
a session answers with a tighter plan.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from daf.core.units import format_bytes
from daf.memory.device_memory import DeviceMemory
from daf.memory.limit_protocol import GiveBack

# Closer to the limit than this, another look should come soon.
NEAR_BYTES = 64 * 2**20
# What PyTorch's caching allocator takes from the driver at a time for blocks of 1 to 10 MiB.
SEGMENT_BYTES = 20 * 2**20

# Of all keepers together, whatever device they bound: taken before a keeper's own lock.
_registry_lock = threading.RLock()
# By device, the share that was set before any keeper set one, and how many are open.
_before: dict[str, tuple[float, int]] = {}


def _enter(memory: DeviceMemory) -> float:
    """One more is open; the user's share."""
    with _registry_lock:
        share, count = _before.get(memory.name, (None, 0))
        share = memory.limit_share() if share is None else share
        _before[memory.name] = share, count + 1
        return share


def _leave(memory: DeviceMemory) -> None:
    """One fewer; the last one sets the user's share again."""
    with _registry_lock:
        share, count = _before.pop(memory.name)
        if count > 1:
            _before[memory.name] = share, count - 1
        memory.limit_to_share(share)


class DeviceKeeper:
    """Keeps what PyTorch reserves on a device within a budget (see ``keeping.Keeper``).

    A share that the user had set stays a bound beside the budget, and is set again on ``close``.
    """

    recycles = True
    can_refuse = True

    def __init__(self, memory: DeviceMemory, give_back: GiveBack = lambda _: 0) -> None:
        self._memory = memory
        self._give_back = give_back
        self._lock = threading.RLock()
        self._total_bytes = 0
        self._share_before: float | None = None
        self._left: weakref.finalize[..., DeviceKeeper] | None = None
        self._share_now: float | None = None
        self._limit_bytes: int | None = None
        self._unbounded = 0
        self._must_finish = False
        self.settings: list[str] = []
        self.spare_more_bytes = 0
        self.missing_bytes = 0

    @property
    def overrun_bytes(self) -> int:
        """By how much a step that had begun to change parameters passed the bound from then on."""
        if not self._must_finish or self._limit_bytes is None:
            return 0
        return max(0, self._memory.span_peak_bytes() - self._limit_bytes)

    def open(self) -> None:
        """Find what there is to bound, and say so."""
        with _registry_lock, self._lock:
            if self._share_before is not None:
                return
            self._total_bytes = self._memory.total_bytes()
            self._share_before = _enter(self._memory)
            # Sessions are left without being closed, in a notebook say.
            self._left = weakref.finalize(self, _leave, self._memory)
            self._left.atexit = False  # the process's share ends with it
            self.settings.append(
                f"PyTorch's allocator reserves no more than the budget on {self._memory.name}, of "
                f"{format_bytes(self._total_bytes)} there; it is configured by "
                f"{self._memory.settings}"
            )

    def close(self) -> None:
        """The share that was there before."""
        with _registry_lock, self._lock:
            self._limit_bytes = None
            if self._left is not None:
                self._left()
            self._left = self._share_before = self._share_now = None
            self.settings.clear()

    def flush(self) -> None:
        """Give everything that is free back to the driver now."""
        self._memory.release_cached()

    def refusals(self) -> int:
        """Allocations that were refused on the device so far."""
        return self._memory.refusals()

    def has_refused(self, error: BaseException, refusals_before: int) -> bool:
        """Is it an error for want of memory? Others follow refusals too that PyTorch itself, or
        the user's own code, knew an answer to.
        """
        is_refusal = self._memory.is_refusal(error, refusals_before)
        if is_refusal:
            self.missing_bytes = SEGMENT_BYTES
        return is_refusal

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:  # noqa: ARG002 - of its kind
        """From now on no more than ``budget_bytes`` are reserved; what lies beyond goes back."""
        with _registry_lock, self._lock:
            self.open()
            self._must_finish = False
            self._share_now = None  # another keeper of the same device may have set one
            self._limit_bytes = max(0, budget_bytes - self.spare_more_bytes)
            self._apply()
            self._shrink()

    def expect(self, expected_bytes: int) -> None:
        """Nothing: blocks are kept for reuse up to the bound, and given back where it is met."""

    def follow_growth(self) -> bool:
        """Nothing grows here but what the allocator holds; returns whether its bound is near."""
        with self._lock:
            if self._limit_bytes is None:
                return False
            return self._memory.held_bytes() > self._limit_bytes - NEAR_BYTES

    def rebound(self, budget_bytes: int | None) -> int:
        """Another budget, or none, in the midst of a step: cached blocks go back to the driver,
        then planes of codes until it is met, and what is asked beyond it is refused. Where
        nothing is bounded yet, the next step begins with this budget.

        Returns:
            Bytes of codes that went.
        """
        with self._lock:
            if self._limit_bytes is not None or budget_bytes is None:
                self._limit_bytes = budget_bytes
                self._apply()
                self._shrink()
            return self._give_codes_back()

    def _give_codes_back(self) -> int:
        """Planes, until no more is held than may be.

        A block of the driver's goes back only when all that lies in it went, so that this takes
        several rounds; one that frees nothing there is the last.
        """
        returned, over_bytes = 0, self._over_bytes()
        while over_bytes > 0:
            went_bytes = self._give_back(over_bytes)
            returned += went_bytes
            self._memory.release_cached()
            before_bytes, over_bytes = over_bytes, self._over_bytes()
            if went_bytes == 0 or over_bytes >= before_bytes:
                break
        return returned

    def _over_bytes(self) -> int:
        return 0 if self._limit_bytes is None else self._memory.held_bytes() - self._limit_bytes

    def must_finish(self) -> None:
        """Nothing is refused until ``bound`` is called again; ``overrun_bytes`` tells the cost.

        Without a limit the allocator keeps all its cached blocks, so these go back now.
        """
        with self._lock:
            if self._limit_bytes is None:
                return
            self._memory.release_cached()
            self._memory.begin_span()
            self._must_finish = True
            self._apply()

    @contextmanager
    def unbounded(self, needed_bytes: int = 0) -> Iterator[None]:
        """No limit inside, for what must not fail half-way: the optimizer's step.

        Without one the allocator takes new blocks rather than giving cached ones back. Where what
        is predicted to be needed could so pass the bound, those go back first.
        """
        with self._lock:
            is_tight = self._limit_bytes is not None and not self._unbounded
            if is_tight and self._memory.held_bytes() + needed_bytes > (self._limit_bytes or 0):
                self._memory.release_cached()
        self._change_unbounded(1)
        try:
            yield
        finally:
            self._change_unbounded(-1)

    def _change_unbounded(self, by: int) -> None:
        with self._lock:
            self._unbounded += by
            self._apply()
            if not self._unbounded:
                self._shrink()

    def _apply(self) -> None:
        """The share that is right now, where it is another one; nothing before ``open``."""
        if self._share_before is None:
            return
        is_free = self._limit_bytes is None or self._unbounded or self._must_finish
        share = 1.0 if is_free else (self._limit_bytes or 0) / self._total_bytes
        share = min(share, self._share_before)
        if share != self._share_now:
            self._memory.limit_to_share(share)
            self._share_now = share

    def _shrink(self) -> None:
        """Cached blocks go back where more is held than may be."""
        if self._limit_bytes is not None and self._memory.held_bytes() > self._limit_bytes:
            self._memory.release_cached()
