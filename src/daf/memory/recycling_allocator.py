"""An allocator that knows its budget, under PyTorch and NumPy while entered (docs/allocator.md)."""

from daf._native import allocator as native
from daf.memory import process_memory
from daf.memory.owners import Claim, MakeRoom, cannot_redirect, owners


def unsupported_reason() -> str | None:
    """Return why this system cannot redirect PyTorch's allocations; None where it can."""
    return native.unsupported_reason() or None


class RecyclingAllocator:
    """Recycles, counts and bounds PyTorch's CPU memory and NumPy's arrays while it is entered.

    One account serves the whole process: of several allocators, and sessions, the least cap and the
    least limit hold (``owners``). Leaving is always safe: surviving blocks stay valid and their
    owner frees them. One that is collected is left.

    Args:
        cap_bytes: the most that freed blocks may hold; None: no cap, so only the limit and the peak
            of live bytes bound them.
        limit_bytes: the most that live, recycled and charged bytes may hold together; None: no
            limit. At the limit an allocation frees recycled blocks, then calls ``reclaim``, then
            fails with PyTorch's ``RuntimeError`` ("can't allocate memory") or a ``MemoryError``.
        reclaim: called with the missing bytes on the allocating thread; frees what it can and
            returns how many bytes that was. It must not refer to the allocator.

    Raises:
        PlatformError: on entering, where allocations cannot be redirected.
        ValueError: a negative cap or limit.
    """

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        limit_bytes: int | None = None,
        reclaim: MakeRoom | None = None,
    ) -> None:
        cap, limit = _checked("cap", cap_bytes), _checked("limit", limit_bytes)
        self._claim = Claim(redirects=True, cap_bytes=cap, limit_bytes=limit, make_room=reclaim)
        owners.leave_with(self, self._claim)

    def __enter__(self) -> "RecyclingAllocator":
        if problem := unsupported_reason():
            raise cannot_redirect(problem)
        owners.enter(self._claim)
        return self

    def __exit__(self, *exception: object) -> None:
        owners.leave(self._claim)

    @property
    def cap_bytes(self) -> int | None:
        """The most that freed blocks may hold; takes effect at once."""
        return self._claim.cap_bytes

    @cap_bytes.setter
    def cap_bytes(self, value: int | None) -> None:
        self._claim.cap_bytes = _checked("cap", value)
        owners.settle()

    @property
    def limit_bytes(self) -> int | None:
        """The most that the account may hold; recycled bytes beyond it are returned at once."""
        return self._claim.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, value: int | None) -> None:
        self._claim.limit_bytes = _checked("limit", value)
        owners.settle()

    def refresh(self) -> None:
        """Redirect libraries loaded since; about a microsecond when there are none."""
        native.refresh()

    @staticmethod
    def trim(wanted_bytes: int | None = None) -> int:
        """Return ``wanted_bytes`` or more recycled bytes (or all) to the system; return the sum."""
        return int(native.trim(wanted_bytes))


def limit_for_process(budget_bytes: int, spare_bytes: int = 0) -> int:
    """Return the account's limit: the budget minus the rest of the process and its spare, or 0."""
    return max(0, budget_bytes - beside_account() - spare_bytes)


def beside_account() -> int:
    """Return the process's bytes that the account does not hold, with code that will return."""
    held_bytes: int = native.statistics()["held_bytes.current"]
    return process_memory.taken_bytes() + absent_code_bytes() - held_bytes


def absent_code_bytes() -> int:
    """Return by how much libraries' code will grow while what was given back returns."""
    awaited_bytes = owners.awaited_code_bytes
    return max(0, awaited_bytes - process_memory.mapped_bytes()) if awaited_bytes else 0


def _checked(what: str, count: int | None) -> int | None:
    if count is not None and count < 0:
        raise ValueError(f"asked for a {what} of {count} bytes; give 0 or more, or None for none")
    return count
