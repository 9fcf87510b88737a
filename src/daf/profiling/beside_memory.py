"""What a process holds beside tensors while steps are measured: at its most, code included.

Loading, and what only a first step does, reads much code that later steps never run. Those pages go
back before anything is measured; what steps need of them returns.
"""

from dataclasses import dataclass

from daf.memory.domain import MemoryDomain
from daf.memory.keeper import Keeper


@dataclass(eq=False)
class BesideMemory:
    """The most bytes (of ``memory``) beside the keeper's account, as ``note`` has seen them."""

    memory: MemoryDomain
    keeper: Keeper

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was noted, and note what is held now."""
        self._most_bytes, self._code_bytes = 0, self.memory.mapped_bytes()
        if self._code_bytes:  # some may have been given back, and will return
            returning = max(self.keeper.code_bytes, self.keeper.least_code_bytes)
            self._code_bytes = max(self._code_bytes, returning)
        self.note()

    def drop_code(self) -> None:
        """Give back libraries' code, and begin to note anew; it takes some milliseconds."""
        self.keeper.drop_code()
        self.begin()

    def note(self) -> None:
        """Take in what is held now; code that the system has taken counts as if it were there."""
        if self.keeper.recycles:
            self._code_bytes = max(self._code_bytes, mapped := self.memory.mapped_bytes())
            beside = self.memory.held_bytes() - self.memory.account_bytes()
            self._most_bytes = max(self._most_bytes, beside + self._code_bytes - mapped)

    def resident_bytes(self) -> int:
        """Return what is held now, with the most that was held beside the account."""
        account = self.memory.account_bytes() if self.keeper.recycles else 0
        return max(self.memory.held_bytes(), self._most_bytes + account)
