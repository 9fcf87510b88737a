"""A budget on a device: PyTorch's caching allocator refuses what is beyond.

The limit is a share of the device (``set_per_process_memory_fraction``). Before it refuses, the
allocator frees its cache, so a refusal means that used blocks and the gaps between them leave no
room. It raises ``OutOfMemoryError``, which a session answers with a tighter plan.
"""

import math
import threading
import weakref

from daf.core.units import format_bytes
from daf.memory.device_memory import DeviceMemory
from daf.memory.keeper import GiveBack, Keeper

NEAR_BYTES = 64 * 2**20  # closer to the limit than this, look again soon
SEGMENT_BYTES = 20 * 2**20  # what PyTorch takes from the driver for blocks of 1 to 10 MiB

_registry_lock = threading.RLock()  # of all devices' keepers; taken before a keeper's own lock
# By device: the share that the user had set, and the open keepers.
_open: "dict[str, tuple[float, weakref.WeakSet[DeviceKeeper]]]" = {}


def _leave(memory: DeviceMemory) -> None:
    """Put in force what the keepers that are left ask, the tightest last; else the user's share."""
    with _registry_lock:
        if memory.name not in _open:
            return  # the last ones were collected together
        share, keepers = _open[memory.name]
        memory.limit_to_share(share)
        if not (left := sorted(keepers, key=DeviceKeeper.tightness)):
            del _open[memory.name]
        for keeper in left:
            keeper.apply_again()


class DeviceKeeper(Keeper):
    """Keeps what PyTorch reserves on a device within a budget and the share that the user set."""

    recycles = True

    def __init__(self, memory: DeviceMemory, give_back: GiveBack = lambda _: 0) -> None:
        super().__init__(give_back)
        self.memory_name = memory.name
        self._lock = threading.RLock()  # guards the limit
        self._limit_bytes: int | None = None
        self._unbounded, self._must_finish = 0, False
        self._was_refused, self._memory = False, memory
        self._total_bytes = 0
        self._share_before: float | None = None
        self._left: weakref.finalize[..., DeviceKeeper] | None = None
        self._share_now: float | None = None

    @property
    def settings(self) -> list[str]:
        if self._share_before is None:
            return []
        return [
            f"PyTorch's allocator reserves no more than the budget on {self._memory.name}, of "
            f"{format_bytes(self._total_bytes)} there; it is configured by {self._memory.settings}"
        ]

    @property
    def missing_bytes(self) -> int:
        return SEGMENT_BYTES if self._was_refused else 0

    @property
    def overrun_bytes(self) -> int:
        if not self._must_finish or self._limit_bytes is None:
            return 0
        return max(0, self._memory.span_peak_bytes() - self._limit_bytes)

    def open(self) -> None:
        with _registry_lock, self._lock:
            if self._share_before is not None or self.is_retired:
                return
            self._total_bytes = self._memory.total_bytes()
            if self.memory_name not in _open:
                _open[self.memory_name] = self._memory.limit_share(), weakref.WeakSet()
            share, keepers = _open[self.memory_name]
            keepers.add(self)
            self._share_before = share
            # Sessions may be abandoned without ``close``, in a notebook say.
            self._left = weakref.finalize(self, _leave, self._memory)
            self._left.atexit = False  # the process's share ends with it

    def close(self) -> None:
        with _registry_lock, self._lock:
            self._limit_bytes = None
            if self._left is not None:
                _open[self._memory.name][1].discard(self)
                self._left()
            self._left = self._share_before = self._share_now = None

    def tightness(self) -> float:
        """Return a number that is higher the less this bound leaves."""
        return -math.inf if self._limit_bytes is None else -self._limit_bytes

    def apply_again(self) -> None:
        """Put this bound in force again after another keeper's."""
        with self._lock:
            self._share_now = None
            self._apply()

    def flush(self) -> None:
        self._memory.release_cached()

    def refusals(self) -> int:
        return self._memory.refusals()

    def has_refused(self, error: BaseException, refusals_before: int) -> bool:
        """True if the error itself is a refusal; PyTorch or user code may have handled others."""
        is_refusal = self._memory.is_refusal(error, refusals_before)
        self._was_refused |= is_refusal
        return is_refusal

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:  # noqa: ARG002 - of its kind
        """Reserve at most ``budget_bytes`` from now on; cached blocks beyond are returned."""
        with _registry_lock, self._lock:
            self.open()
            self._must_finish = False
            self._share_now = None  # another keeper of the same device may have set one
            self._limit_bytes = max(0, budget_bytes - self.spare_more_bytes)
            self._apply()
            self._shrink()

    def follow_growth(self) -> bool:
        """Return True if the bound is near; only the allocator's own memory counts here."""
        with self._lock:
            return self._limit_bytes is not None and self._over_bytes() > -NEAR_BYTES

    def rebound(self, budget_bytes: int | None) -> int:
        """Set another budget, or none, within a step; return the bytes of codes evicted for it.

        The cache is freed first, then planes are evicted; what is asked beyond is refused. Without
        a bound so far, the next step begins with this budget.
        """
        with self._lock:
            if self._limit_bytes is not None or budget_bytes is None:
                self._limit_bytes = budget_bytes
                self._apply()
                self._shrink()
            return self._give_codes_back()

    def _give_codes_back(self) -> int:
        """Evict planes in rounds until one frees none: blocks return only when wholly free."""
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
        with self._lock:
            if self._limit_bytes is None:
                return
            self._memory.release_cached()
            self._memory.take_allocated_peak()  # ``span_peak_bytes`` begins here
            self._must_finish = True
            self._apply()

    def _before_unbounded(self, needed_bytes: int) -> None:
        with self._lock:
            # Without a limit the allocator takes new blocks before it frees its cache.
            is_bound = self._limit_bytes is not None and not self._unbounded
            if is_bound and self._over_bytes() + needed_bytes > 0:
                self._memory.release_cached()

    def _change_unbounded(self, by: int | None) -> int:
        with self._lock:
            before = self._unbounded
            if by is None and not (before or self._must_finish):
                return 0
            self._must_finish = self._must_finish and by is not None
            self._unbounded = 0 if by is None else max(0, before + by)
            self._apply()
            if not self._unbounded:
                self._shrink()
            return before

    def _apply(self) -> None:
        """Set the share in force, if it changed; nothing before ``open``."""
        if self._share_before is None:
            return
        is_free = self._limit_bytes is None or self._unbounded or self._must_finish
        share = 1.0 if is_free else (self._limit_bytes or 0) / self._total_bytes
        share = min(share, self._share_before)
        if share != self._share_now:
            self._memory.limit_to_share(share)
            self._share_now = share

    def _shrink(self) -> None:
        if self._over_bytes() > 0:
            self._memory.release_cached()
