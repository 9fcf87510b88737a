"""What a store gave up since the step began: planes, bytes, and of which sites."""

from __future__ import annotations

from collections import Counter

from daf.store.buffers import Store


class Evictions:
    """Follows one store; ``collect`` often, since a pool lists only so many at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listed: set[tuple[int, int]] = set()
        self._unlisted = 0
        self._bytes_before = store.evicted_bytes
        self.bytes_by_tag: Counter[int] = Counter()

    def begin(self) -> None:
        """A new step begins."""
        self.collect()
        self._listed.clear()
        self._unlisted = 0
        self.bytes_by_tag.clear()
        self._bytes_before = self._store.evicted_bytes

    def collect(self) -> None:
        """Ask the store what went."""
        entries, unlisted = self._store.take_evictions()
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
        return self._store.evicted_bytes - self._bytes_before
