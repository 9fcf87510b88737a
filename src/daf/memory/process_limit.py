"""A budget on the process's memory, held by a claim on what is set in the process (``owners``).

Freed blocks are recycled under a hard limit where allocations can be redirected
(``recycling_allocator``). Where glibc is, other blocks return to the system once freed (``glibc``).
"""

from daf._native import allocator as native
from daf.core.units import format_bytes
from daf.memory import glibc, process_memory
from daf.memory.keeper import GiveBack, Keeper
from daf.memory.owners import Claim, account_lock, owners
from daf.memory.recycling_allocator import (
    absent_code_bytes,
    beside_account,
    limit_for_process,
    unsupported_reason,
)
from daf.memory.statistics import audit, stats

# What may grow beside the account during one step: Python objects, code that oneDNN generates.
SPARE_FRACTION = 0.0025
SPARE_BYTES = 6 * 2**20
LEAST_SPARE_BYTES = 4 * 2**20  # of it, kept free when that grew further, until the next look
# Of 170 MB of libraries that a convolutional net's first step reads, later ones need 33 MB; with
# what measuring reads, up to 60 MB were seen.
CODE_BYTES = 56 * 2**20
NEAR_BYTES = 16 * 2**20  # from the limit: here growth beside the account matters within ms


class MemoryKeeper(Keeper):
    """Keeps the process within a budget; closed when it is collected."""

    def __init__(self, give_back: GiveBack = lambda _: 0) -> None:
        super().__init__(give_back)
        self.memory_name = "the process"
        self.can_refuse = unsupported_reason() is None
        self._claim = Claim(
            redirects=self.can_refuse,
            returns_freed_blocks=True,
            make_room=give_back,
            limit_by_pages=_limit_by_pages,
        )
        self._used_bytes = 0  # when ``begin_need`` was called
        owners.leave_with(self, self._claim)

    @property
    def settings(self) -> list[str]:
        found: list[str] = []
        if self.recycles:
            found.append(
                "PyTorch's and NumPy's blocks of 128 KiB and more are recycled, the budget is a "
                "limit"
            )
        if self._claim in owners and glibc.can_return_freed_blocks():
            size = format_bytes(glibc.RETURN_BLOCKS_FROM_BYTES)
            found.append(f"glibc returns other freed blocks of {size} and more at once")
        return found

    @property
    def missing_bytes(self) -> int:
        return self._claim.missing_bytes

    @property
    def overrun_bytes(self) -> int:
        return self._claim.overrun_bytes

    @property
    def overdraft_bytes(self) -> int:
        return int(native.overdraft_bytes()) if self.recycles else 0

    @property
    def recycles(self) -> bool:
        return self._claim.redirects and self._claim in owners

    @property
    def can_reserve(self) -> bool:
        return self.recycles

    def begin_need(self) -> None:
        _, self._used_bytes = native.take_watermark()

    def need_bytes(self) -> int:
        most_bytes, _ = native.take_watermark()
        return max(0, int(most_bytes) - self._used_bytes)

    def reserve(self, needed_bytes: int) -> None:
        """Make room for so much, of codes that may go; RuntimeError: there is none."""
        with account_lock:
            if not self.recycles or self._claim.limit_bytes is None:
                return
            _, used_bytes = native.take_watermark()
            missing_bytes = int(used_bytes) + needed_bytes - self._claim.limit_bytes
        if missing_bytes <= 0 or self._give_back(missing_bytes) >= missing_bytes:
            return
        self._claim.missing_bytes = missing_bytes
        native.count_refusal()
        raise RuntimeError(
            f"asked for room for the rest of a step, {format_bytes(needed_bytes)}, before its "
            f"first update; {format_bytes(missing_bytes)} are missing"
        )

    def open(self) -> None:
        """Apply the settings; does nothing if open, or retired."""
        if self.is_retired:
            return
        owners.enter(self._claim)  # again in a forked child, which has no claims

    def close(self) -> None:
        with account_lock:
            claim = self._claim
            claim.budget_bytes = claim.limit_bytes = claim.expected_bytes = None
            claim.lifted, claim.must_finish = 0, False
            owners.leave(claim)
            self.code_returned()

    def flush(self) -> None:
        self._give_back(0)
        if self.recycles:
            native.trim(None)
            native.drop_unwinding_tables()  # 3 to 8 MB of PyTorch's, read from files again
        glibc.return_free_memory()

    def drop_code(self) -> None:
        if self.can_refuse:
            returning_bytes = min(CODE_BYTES, process_memory.mapped_bytes())
            self.code_bytes = max(self.code_bytes, returning_bytes)
            owners.awaited_code_bytes = max(self.code_bytes, self.least_code_bytes)
            process_memory.drop_code()

    def code_returned(self) -> None:
        owners.awaited_code_bytes = 0

    def refusals(self) -> int:
        return int(native.refusals()) if self.recycles else 0

    def has_refused(self, error: BaseException, refusals_before: int) -> bool:  # noqa: ARG002
        """True if memory was refused since, because user code may turn a refusal into any error."""
        return self.refusals() > refusals_before

    def bound(self, expected_bytes: int, budget_bytes: int) -> None:
        """Refuse what would pass the budget; keep freed blocks up to ``expected_bytes``.

        Limits of other budgets are computed anew too: the process may have grown, or shrunk.
        """
        with account_lock:
            if not self.recycles:
                return
            self._claim.budget_bytes = budget_bytes
            self._claim.spare_bytes = self.spare_more_bytes
            other_bytes = beside_account()
            for claim in owners.living():
                claim.must_finish, claim.overrun_bytes = False, 0
                _set_limit(claim, other_bytes)
            self._expect(expected_bytes, other_bytes)

    def expect(self, expected_bytes: int) -> None:
        """Keep freed blocks up to this; the bound stays. Does nothing without one."""
        with account_lock:
            if self.recycles and self._claim.budget_bytes is not None:
                self._expect(expected_bytes, beside_account())

    def _expect(self, expected_bytes: int, other_bytes: int) -> None:
        spare_bytes = _spare_bytes(self._claim.budget_bytes or 0)
        if self.least_code_bytes:  # freed blocks are kept where no code is taken for them
            spare_bytes += max(0, self.least_code_bytes - process_memory.mapped_bytes())
        self._claim.expected_bytes = max(0, expected_bytes - other_bytes - spare_bytes)
        owners.settle()

    def follow_growth(self) -> bool:
        """Lower the limit by what the rest of the process grew beyond its spare; True if near.

        Called periodically from another thread. glibc's free small blocks are returned first. The
        limit falls because a refused step can be retried, while an exceeded budget is broken.
        """
        with account_lock:
            claim = self._claim
            if not self.recycles or claim.limit_bytes is None or claim.lifted:
                return False
            if self._overgrown_bytes() > 0:
                glibc.return_free_memory()
            over_bytes = 0 if claim.must_finish else self._overgrown_bytes()
            if over_bytes > 0:
                claim.limit_bytes = max(0, claim.limit_bytes - over_bytes)
                owners.settle()
            return stats()["held_bytes.current"] > claim.limit_bytes - NEAR_BYTES

    def _overgrown_bytes(self) -> int:
        """Return the bytes over budget if the limit were used up; 0 if the account just changed."""
        held_bytes = stats()["held_bytes.current"]
        limit_bytes = limit_for_process(self._claim.budget_bytes or 0, LEAST_SPARE_BYTES)
        is_quiet = stats()["held_bytes.current"] == held_bytes
        return max(0, (self._claim.limit_bytes or 0) - limit_bytes) if is_quiet else 0

    def rebound(self, budget_bytes: int | None) -> int:
        """Set another budget within a step, from any thread; return what ``give_back`` freed.

        A lower one frees recycled blocks, then calls ``give_back`` until the process is within it,
        and refuses what is asked beyond; a higher one, or None, grants the step more.
        """
        with account_lock:
            claim = self._claim
            if budget_bytes is None:
                claim.budget_bytes = claim.limit_bytes = claim.expected_bytes = None
                owners.settle()
                return 0
            over_bytes = process_memory.taken_bytes() - budget_bytes
            if self.recycles and claim.budget_bytes is not None:
                claim.budget_bytes, claim.spare_bytes = budget_bytes, self.spare_more_bytes
                limit_bytes = _set_limit(claim, beside_account())
                owners.settle()
                over_bytes = stats()["held_bytes.current"] - limit_bytes
            return self._give_back(over_bytes) if over_bytes > 0 else 0

    def must_finish(self) -> None:
        self._claim.must_finish = True

    def _change_unbounded(self, by: int | None) -> int:
        with account_lock:
            before = self._claim.lifted
            self._claim.lifted = 0 if by is None else max(0, before + by)
            if by is None:
                self._claim.must_finish, self._claim.overrun_bytes = False, 0
            owners.settle()
            return before


def _set_limit(claim: Claim, other_bytes: int) -> int:
    """Set and return the limit that a budget, if there is one, leaves beside ``other_bytes``."""
    if claim.budget_bytes is not None:
        spare_bytes = _spare_bytes(claim.budget_bytes) + claim.spare_bytes
        claim.limit_bytes = max(0, claim.budget_bytes - other_bytes - spare_bytes)
    return claim.limit_bytes or 0


def _limit_by_pages(claim: Claim, missing_bytes: int) -> int | None:
    """Return the limit that the budget leaves now, where it may have risen by so much."""
    # Blocks that are not written yet are the account's already, and so no other part's. To find
    # them takes ms, so it is asked first what the limit would be if there were none missing.
    if claim.budget_bytes is None:
        return claim.limit_bytes
    glibc.return_free_memory()
    left_bytes = claim.budget_bytes - _spare_bytes(claim.budget_bytes) - claim.spare_bytes
    left_bytes -= absent_code_bytes()
    most_bytes = left_bytes + stats()["held_bytes.current"] - process_memory.resident_bytes()
    if most_bytes < (claim.limit_bytes or 0) + missing_bytes:
        return claim.limit_bytes
    return max(0, left_bytes - audit().rest_bytes)


def _spare_bytes(budget_bytes: int) -> int:
    return int(SPARE_FRACTION * budget_bytes) + SPARE_BYTES
