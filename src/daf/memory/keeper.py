"""What a budget's memory is, and the base of its keepers, whatever memory that is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from daf.core.replaced import replaced, undone
from daf.memory.statistics import Meter

Found = TypeVar("Found")
GiveBack = Callable[[int], int]  # frees at least so many bytes of other memory, returns how many


class MemoryDomain(Protocol):
    """Bytes of one memory, now and at peak; ``name`` is for messages."""

    name: str

    def held_bytes(self) -> int:
        """Return the bytes held now, cached blocks included."""

    def account_bytes(self) -> int:
        """Return the part that a bounded allocator holds; the rest grows by itself."""
        return self.held_bytes()

    def mapped_bytes(self) -> int:
        """Return the part that holds pages of files, which the system may take back any time."""
        return 0

    def peak_bytes(self) -> int:
        """Return the most bytes held since ``reset_peak``."""

    def peak_and_swapped_bytes(self) -> tuple[int, int]:
        """Return the same, and the part of it that the system has swapped out by now."""
        return self.peak_bytes(), 0

    def reset_peak(self) -> object:
        """Start a new peak."""

    def wait(self) -> None:
        """Wait until the device is idle, so that a clock is right."""

    def meter(self) -> Meter:
        """Return the best meter for peaks of single moments."""


class Keeper(ABC):
    """Bounds memory while a budget is in force; ``close`` undoes that."""

    memory_name: str  # which memory it bounds, for messages and to tell whose budgets add up
    can_refuse = True  # an allocation beyond the bound is an error
    _is_turn = False

    def __init__(self, give_back: GiveBack) -> None:
        self.least_code_bytes = 0  # of libraries, cached included, to leave room for
        self.code_bytes = 0  # of those that were given back, what will return
        self.spare_more_bytes = 0  # beside the usual, while something runs for the first time
        self._give_back = give_back  # called at the limit
        self.is_retired = False

    @property
    @abstractmethod
    def settings(self) -> list[str]:
        """What is set now, in words."""

    @property
    @abstractmethod
    def recycles(self) -> bool:
        """True if freed blocks are kept for reuse under the bound."""

    @property
    @abstractmethod
    def missing_bytes(self) -> int:
        """Bytes by which the last refused allocation passed the bound; 0 if unknown."""

    @property
    @abstractmethod
    def overrun_bytes(self) -> int:
        """Bytes over the bound of a step that had begun to change parameters."""

    @property
    def overdraft_bytes(self) -> int:
        """Bytes served beyond the bound so far, where a refusal would have been a crash."""
        return 0

    @abstractmethod
    def open(self) -> None:
        """Apply the settings; does nothing if open."""

    @abstractmethod
    def close(self) -> None:
        """Undo everything; live blocks stay valid."""

    def retire(self) -> None:
        """Close for good: nothing opens it again."""
        self.is_retired = True
        self.close()

    @abstractmethod
    def flush(self) -> None:
        """Return all free memory to the system, and what a refusal's exception has read."""

    def drop_code(self) -> None:  # noqa: B027
        """Return libraries' code to the system; what runs again is read again."""

    def code_returned(self) -> None:  # noqa: B027
        """Leave it no more room: a step has run, and read what steps need."""

    @abstractmethod
    def refusals(self) -> int:
        """Return the number of allocations refused so far."""

    @abstractmethod
    def has_refused(self, error: BaseException, refusals_before: int) -> bool:
        """True if an error comes from memory refused since ``refusals_before``."""

    @abstractmethod
    def bound(self, expected_bytes: int, budget_bytes: int) -> None:
        """Hold ``budget_bytes`` from now on; about ``expected_bytes`` will be needed."""

    def expect(self, expected_bytes: int) -> None:  # noqa: B027
        """Expect about this need from now on; the bound stays."""

    @abstractmethod
    def follow_growth(self) -> bool:
        """Check that the bound still holds; return True if it is near."""

    @abstractmethod
    def rebound(self, budget_bytes: int | None) -> int:
        """Set another bound, or none, at once; return the bytes evicted for it."""

    @property
    def can_reserve(self) -> bool:
        """True if ``need_bytes`` is measured, so that ``commit`` can reserve."""
        return False

    def begin_need(self) -> None:  # noqa: B027
        """Measure from now on what is needed beside that in use."""

    def need_bytes(self) -> int:
        """Return the most that was in use beside it since ``begin_need``."""
        return 0

    def commit(self, needed_bytes: int) -> None:
        """Refuse nothing until ``restore_bound``: free what can be, count the rest as an overrun.

        ``needed_bytes``: of the rest of the step; codes are evicted for them before. RuntimeError:
        there is no room for them; the bound stays.
        """
        self.reserve(needed_bytes)
        self.must_finish()

    def reserve(self, needed_bytes: int) -> None:  # noqa: B027
        """Make room for so much; RuntimeError if there is none, as a refused allocation says."""

    @abstractmethod
    def must_finish(self) -> None:
        """Refuse nothing until ``bound`` or ``restore_bound``, with what room there is."""

    @contextmanager
    def unbounded(self, needed_bytes: int = 0) -> Iterator[None]:
        """Lift the bound for an update, which must not fail half-way; it needs ``needed_bytes``."""
        self._before_unbounded(needed_bytes)
        self._change_unbounded(1)
        try:
            yield
        finally:
            self._change_unbounded(-1)

    def within(self, budget_bytes: float, run: Callable[[], Found]) -> Found | None:
        """Run a measurement under a bound of its own, where none is in force.

        Returns None if memory was refused for it. An infinite budget bounds nothing.
        """
        if math.isinf(budget_bytes):
            return run()
        refused = self.refusals()
        lifted = self._change_unbounded(None)
        try:
            self.bound(int(budget_bytes), int(budget_bytes))
            return run()
        except Exception as error:  # code of the user's may put its own around a refusal
            if not self.has_refused(error, refused):
                raise
            return None
        finally:
            self._change_unbounded(lifted)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Restore the bound before and after; one within another (in a hook) does not."""
        if self._is_turn:
            yield
            return
        with replaced(self, _is_turn=True), undone(self.restore_bound):
            self.restore_bound()
            yield

    def restore_bound(self) -> None:
        """Bound again what an interrupted step left unbounded, or one that had to finish."""
        self._change_unbounded(None)

    def _before_unbounded(self, needed_bytes: int) -> None:  # noqa: B027
        """Make way for what the limit will not refuse."""

    @abstractmethod
    def _change_unbounded(self, by: int | None) -> int:
        """Count who has lifted the bound (None: nobody), act on it; return the count before."""
