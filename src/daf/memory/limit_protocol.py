"""What every keeper of a budget does, whatever memory it is that the budget bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

# Asked to return at least so many bytes of other memory (a pool's); returns how many it did.
GiveBack = Callable[[int], int]


class Keeper(Protocol):
    """Bounds memory while a budget is in force, and undoes that on ``close``.

    ``settings``: what is set now, in words. ``spare_more_bytes``: what the bound leaves beside the
    usual, while something runs for the first time. ``missing_bytes``: how far beyond the limit
    the allocation lay that was refused last, where that is known.
    """

    settings: list[str]
    spare_more_bytes: int
    missing_bytes: int

    @property
    def recycles(self) -> bool:
        """Are freed blocks kept for reuse, under the bound?"""

    @property
    def can_refuse(self) -> bool:
        """Is an allocation beyond the bound an error?"""

    @property
    def overrun_bytes(self) -> int:
        """By how much a step that had begun to change parameters passed the bound."""

    def open(self) -> None:
        """Set what there is to be set; does nothing when it is set already."""

    def close(self) -> None:
        """Undo everything."""

    def flush(self) -> None:
        """Give everything that is free back to the system now."""

    def refusals(self) -> int:
        """Allocations that were refused so far."""

    def has_refused(self, error: BaseException, refusals_before: int) -> bool:
        """Does an error come from memory that was refused since ``refusals`` was so many?"""

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:
        """From now on ``budget_bytes`` is not passed; about ``expected_bytes`` will be needed."""

    def expect(self, expected_bytes: int) -> None:
        """From now on about so much will be needed; the bound stays."""

    def follow_growth(self) -> bool:
        """Look whether the bound still holds; returns whether it is near."""

    def rebound(self, budget_bytes: int | None) -> int:
        """Another bound, or none, at once; returns what was given back for it (bytes)."""

    def must_finish(self) -> None:
        """Until ``bound`` is called again nothing is refused."""

    def unbounded(self, needed_bytes: int = 0) -> AbstractContextManager[None]:
        """No bound inside, where no more than ``needed_bytes`` are predicted to be asked for."""
