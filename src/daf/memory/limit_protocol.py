"""The interface of a budget's keeper, whatever memory the budget bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

# Asked to free at least so many bytes of other memory (a pool's); returns how many it freed.
GiveBack = Callable[[int], int]


class Keeper(Protocol):
    """Bounds memory while a budget is in force; ``close`` undoes that.

    ``settings``: what is set now, in words. ``spare_more_bytes``: room left beside the usual while
    something runs for the first time. ``missing_bytes``: by how much the last refused allocation
    passed the limit, where known.
    """

    settings: list[str]
    spare_more_bytes: int
    missing_bytes: int

    @property
    def recycles(self) -> bool:
        """True if freed blocks are kept for reuse under the bound."""

    @property
    def can_refuse(self) -> bool:
        """True if an allocation beyond the bound is an error."""

    @property
    def overrun_bytes(self) -> int:
        """Bytes over the bound of a step that had begun to change parameters."""

    def open(self) -> None:
        """Apply the settings; does nothing if open."""

    def close(self) -> None:
        """Undo everything."""

    def flush(self) -> None:
        """Return all free memory to the system."""

    def refusals(self) -> int:
        """Return the number of allocations refused so far."""

    def has_refused(self, error: BaseException, refusals_before: int) -> bool:
        """True if an error comes from memory refused since ``refusals_before``."""

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:
        """Hold ``budget_bytes`` from now on; about ``expected_bytes`` will be needed."""

    def expect(self, expected_bytes: int) -> None:
        """Expect about this need from now on; the bound stays."""

    def follow_growth(self) -> bool:
        """Check that the bound still holds; return True if it is near."""

    def rebound(self, budget_bytes: int | None) -> int:
        """Set another bound, or none, at once; return the bytes evicted for it."""

    def must_finish(self) -> None:
        """Refuse nothing until ``bound`` is called again."""

    def unbounded(self, needed_bytes: int = 0) -> AbstractContextManager[None]:
        """Lift the bound inside; at most ``needed_bytes`` are predicted to be asked for."""
