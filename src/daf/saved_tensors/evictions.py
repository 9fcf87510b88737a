"""What stores gave up since the step began: planes, bytes, and of which sites."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from daf.pool.views import EvictedPlane


class GivesUp(Protocol):
    """A store, or several."""

    @property
    def evicted_bytes(self) -> int:
        """Bytes of planes given up since it began."""

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Planes given up since the last call, and how many more were not listed."""


class Evictions:
    """Follows stores; ``collect`` often, since a pool lists only so many at a time."""

    def __init__(self, *stores: GivesUp) -> None:
        self._stores = stores
        self._listed: set[tuple[int, int]] = set()
        self._unlisted = 0
        self._bytes_before = self._all_bytes()
        self.bytes_by_tag: Counter[int] = Counter()

    def begin(self) -> None:
        """A new step begins."""
        self.collect()
        self._listed.clear()
        self._unlisted = 0
        self.bytes_by_tag.clear()
        self._bytes_before = self._all_bytes()

    def collect(self) -> None:
        """Ask the store what went."""
        for store in self._stores:
            entries, unlisted = store.take_evictions()
            self._unlisted += unlisted
            for entry in entries:
                self._listed.add((entry.handle, entry.plane))
                self.bytes_by_tag[entry.tag] += entry.nbytes

    @property
    def planes(self) -> int:
        """Planes of tensors that are gone, in part or whole."""
        return len(self._listed) + self._unlisted

    @property
    def nbytes(self) -> int:
        """Bytes of codes that are gone."""
        return self._all_bytes() - self._bytes_before

    def _all_bytes(self) -> int:
        return sum(store.evicted_bytes for store in self._stores)
