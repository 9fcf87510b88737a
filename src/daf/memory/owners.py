"""The owners of what is set in the process, and the settings that follow from all of them."""

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from daf._native import allocator as native
from daf.core.errors import PlatformError
from daf.memory import glibc

MakeRoom = Callable[[int], int]  # frees at least so many bytes if it can, returns how many

# One lock for the one account. A fork takes it, or the child could find it held for good.
account_lock = threading.RLock()


@dataclass(eq=False, slots=True)
class Claim:
    """What one owner asks of the process (bytes; None: nothing); ``settle`` follows a change.

    ``budget_bytes``: of the whole process, from which ``limit_bytes``, the account's, follows;
    ``spare_bytes`` less than usual. ``expected_bytes``: freed blocks make way beyond it, until more
    is needed. ``lifted``: while above 0, no limit is in force. ``make_room``: called at the limit;
    ``limit_by_pages``: then computes the limit anew, where the rest of the process may have given
    back the missing bytes. ``must_finish``: nothing may be refused; ``overrun_bytes`` counts what
    passes all limits then. ``missing_bytes``: by which the last refusal passed the limit.
    """

    redirects: bool = False  # PyTorch's and NumPy's allocations pass the account
    returns_freed_blocks: bool = False  # glibc's, at once
    cap_bytes: int | None = None
    budget_bytes: int | None = None
    spare_bytes: int = 0
    limit_bytes: int | None = None
    expected_bytes: int | None = None
    make_room: MakeRoom | None = None
    limit_by_pages: "Callable[[Claim, int], int | None] | None" = None
    lifted: int = 0
    must_finish: bool = False
    overrun_bytes: int = 0
    missing_bytes: int = 0
    owner: weakref.ref[object] | None = None  # the claim ends with it


class Owners:
    """The living claims of one process; any thread may call."""

    def __init__(self) -> None:
        self._claims: dict[Claim, None] = {}  # in order of entering
        self._changes = 0
        self.awaited_code_bytes = 0  # so much of mapped files at least will be needed again
        self._modules = 0  # imported when libraries were looked at last
        # Held by a session while it measures, plans and steps. The process has one peak, one limit
        # and one global random state, so that sessions of several threads take turns.
        self.turn = threading.RLock()

    def __contains__(self, claim: Claim) -> bool:
        return claim in self._claims

    def enter(self, claim: Claim) -> None:
        """Put a claim in force, if it is not; PlatformError: the system cannot redirect memory."""
        with account_lock:
            if claim in self._claims and (native.is_installed() or not claim.redirects):
                return
            self._claims[claim] = None
            try:
                self.settle()
            except PlatformError:
                self.leave(claim)
                raise

    def leave(self, claim: Claim) -> None:
        """End a claim; what the others ask stays in force, or nothing."""
        with account_lock:
            self._claims.pop(claim, None)
            self.settle()

    def leave_with(self, owner: object, claim: Claim) -> None:
        """End a claim when its owner is collected. ``claim`` must not refer to ``owner``."""
        claim.owner = weakref.ref(owner)  # if the next line's call is interrupted
        weakref.finalize(owner, self.leave, claim).atexit = False  # what is set ends with a process

    def settle(self) -> None:
        """Put in force what the living claims ask."""
        with account_lock:
            self._changes += 1
            done = 0
            while done != self._changes:  # a collection in here may end claims
                done = self._changes
                for claim in [*self._claims]:
                    if claim.owner is not None and claim.owner() is None:  # it was collected
                        self._claims.pop(claim, None)
                self._apply([*self._claims])

    def living(self) -> list[Claim]:
        """Return all claims, the oldest first."""
        return [*self._claims]

    def forget(self) -> None:
        """End all claims, in the child of a fork: what bounds the parent is no business of it."""
        self._claims.clear()
        self.turn = threading.RLock()  # another thread of the parent may hold it
        self.settle()

    def _apply(self, claims: list[Claim]) -> None:
        redirects = returns = False
        cap: int | None = None
        expected: int | None = None
        for claim in claims:  # with each step, so that it takes a microsecond
            redirects, returns = redirects or claim.redirects, returns or claim.returns_freed_blocks
            cap, expected = _less(cap, claim.cap_bytes), _less(expected, claim.expected_bytes)
        if redirects and not native.is_installed():
            if problem := native.install():
                raise cannot_redirect(problem)
        elif redirects and len(sys.modules) != self._modules:  # NumPy was imported since, say
            self._modules = len(sys.modules)
            native.refresh()  # takes 0.1 ms
        native.set_cap(cap)
        limit = _limit_of(claims)
        native.set_limit(None if limit is None else _less(limit, expected))
        native.set_reclaim(self._make_room if redirects else None)
        glibc.return_freed_blocks(returns)
        if not redirects and native.is_installed():
            native.remove()

    def _make_room(self, missing_bytes: int) -> int:
        """Free memory for an allocation at the limit, on its thread; returns bytes, 0: refused."""
        with account_lock:
            claims = [*self._claims]
            limit, in_force = _limit_of(claims), native.settings()[1]
            if limit is None or (in_force is not None and in_force < limit):
                for claim in claims:
                    claim.expected_bytes = None
                self.settle()
                return missing_bytes
        returned = 0
        for claim in reversed(claims):
            if returned < missing_bytes and claim.make_room is not None:
                returned += claim.make_room(missing_bytes - returned)
        asked = claims, missing_bytes
        return returned or self._regained(*asked) or self._overrun(*asked)

    def _regained(self, claims: list[Claim], missing_bytes: int) -> int:
        """Raise limits by what the rest of the process gave back since, if that suffices."""
        with account_lock:
            limit, before = _limit_of(claims), [claim.limit_bytes for claim in claims]
            for claim in claims:
                if claim.limit_by_pages is not None:
                    claim.limit_bytes = claim.limit_by_pages(claim, missing_bytes)
            found = _limit_of(claims)
            if limit is not None and found is not None and found - limit >= missing_bytes:
                self.settle()
                return missing_bytes
            for claim, limit_bytes in zip(claims, before, strict=True):
                claim.limit_bytes = limit_bytes
        return 0

    def _overrun(self, claims: list[Claim], missing_bytes: int) -> int:
        with account_lock:
            for claim in claims:
                if claim.must_finish:
                    claim.overrun_bytes += missing_bytes
                    self.settle()
                    return missing_bytes
                claim.missing_bytes = missing_bytes
        return 0


def cannot_redirect(problem: str) -> PlatformError:
    """Return the error where allocations cannot be redirected."""
    return PlatformError(
        f"asked to recycle PyTorch's CPU memory; found: {problem}; without it, train as before or "
        "let glibc return freed blocks (``owners.enter(Claim(returns_freed_blocks=True))``)"
    )


def _limit_of(claims: list[Claim]) -> int | None:
    limit, overrun = None, 0
    for claim in claims:
        if claim.lifted:
            return None
        limit, overrun = _less(limit, claim.limit_bytes), overrun + claim.overrun_bytes
    return None if limit is None else limit + overrun


def _less(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


owners = Owners()  # of this process


def _after_fork_in_child() -> None:
    try:
        owners.forget()
    finally:
        account_lock.release()


# Threads may allocate while the interpreter exits.
atexit.register(native.set_reclaim, None)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=account_lock.acquire,
        after_in_parent=account_lock.release,
        after_in_child=_after_fork_in_child,
    )
