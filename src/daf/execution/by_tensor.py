"""What is known of tensors, by identity, for as long as they live."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

Known = TypeVar("Known")


class ByTensor(Generic[Known]):
    """A mapping from tensors themselves; it keeps none alive, and forgets those that died."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Known]] = {}

    def __setitem__(self, tensor: Tensor, known: Known) -> None:
        entries, key = self._entries, id(tensor)

        def forget(dead: weakref.ref[Tensor]) -> None:
            if key in entries and entries[key][0] is dead:  # not another one at that address
                del entries[key]

        entries[key] = (weakref.ref(tensor, forget), known)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: Tensor) -> Known | None:
        """What is known of this very tensor."""
        place, known = self._entries.get(id(tensor), (None, None))
        return known if place is not None and place() is tensor else None

    def values(self) -> list[Known]:
        """What is known of every tensor that is alive."""
        return [known for place, known in self._entries.values() if place() is not None]
