"""The paged pools of all devices as one; usually there is a single device."""

from __future__ import annotations

import threading

import torch

from daf.pool.device_pool import DevicePagedStore
from daf.pool.views import EvictedPlane


class DeviceStores:
    """A pool for every device, made with its first code; each has the same cap."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        self._cap_bytes = cap_bytes
        self._stores: dict[torch.device, DevicePagedStore] = {}
        self._lock = threading.Lock()  # guards the dictionary: other threads set caps

    def on(self, device: torch.device) -> DevicePagedStore:
        """Return the pool of one device."""
        with self._lock:
            found = self._stores.get(device)
            if found is None:
                found = self._stores[device] = DevicePagedStore(device, self._cap_bytes)
            return found

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        return sum(store.live_bytes for store in self._all())

    @property
    def evicted_bytes(self) -> int:
        """Bytes of planes evicted since they began."""
        return sum(store.evicted_bytes for store in self._all())

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Return the evictions of all pools, as ``PagedStore.take_evictions`` does."""
        entries: list[EvictedPlane] = []
        unlisted = 0
        for store in self._all():
            found, more = store.take_evictions()
            entries += found
            unlisted += more
        return tuple(entries), unlisted

    def set_cap(self, cap_bytes: int | None) -> None:
        """Set the cap of each pool at once, and of pools to come."""
        with self._lock:
            self._cap_bytes = cap_bytes
            stores = list(self._stores.values())
        for store in stores:
            store.set_cap(cap_bytes)

    def give_back(self, nbytes: int) -> int:
        """Return memory to PyTorch's allocator, from one pool after the other; returns bytes."""
        returned = 0
        for store in self._all():
            if returned < nbytes:
                returned += store.give_back(nbytes - returned)
        return returned

    def _all(self) -> list[DevicePagedStore]:
        with self._lock:
            return list(self._stores.values())
