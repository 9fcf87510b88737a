"""The planes that stores evicted since the step began, by site."""

from __future__ import annotations

from collections import Counter

from daf.pool.device_pool import DevicePagedStore, DeviceStores
from daf.pool.store import Store


class Evictions:
    """The evictions of stores; ``collect`` often, since a pool's list is bounded."""

    def __init__(self, store: Store, devices: DeviceStores) -> None:
        self._store, self._devices = store, devices
        self._listed: set[tuple[int, int]] = set()
        self._unlisted = 0
        self._bytes_before = self._collected_bytes = self._all_bytes()
        self.bytes_by_tag: Counter[int] = Counter()

    def begin(self) -> None:
        """Begin a new step."""
        self.collect()
        self._listed.clear()
        self._unlisted = 0
        self.bytes_by_tag.clear()
        self._bytes_before = self._all_bytes()

    def collect(self) -> int:
        """Take the evictions of all stores; return their bytes since the step began."""
        before, self._collected_bytes = self._collected_bytes, self._all_bytes()
        if before != self._collected_bytes:
            for store in self._all():
                entries, unlisted = store.take_evictions()
                self._unlisted += unlisted
                for entry in entries:
                    self._listed.add((entry.handle, entry.plane))
                    self.bytes_by_tag[entry.tag] += entry.nbytes
        return self._collected_bytes - self._bytes_before

    @property
    def planes(self) -> int:
        """The number of evicted planes, of tensors gone in part or whole."""
        return len(self._listed) + self._unlisted

    def _all_bytes(self) -> int:
        return sum(store.evicted_bytes for store in self._all())

    def _all(self) -> list[Store | DevicePagedStore]:
        return [self._store, *self._devices.all()]
