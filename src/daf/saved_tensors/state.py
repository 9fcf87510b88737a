"""The state of a capture's saved tensors, over all its steps, and what was evicted of them."""

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from daf.codecs.coder import Coder
from daf.codecs.scratch import Scratch
from daf.core.policy import Need, Site
from daf.pool.device_pool import DevicePagedStore, DeviceStores
from daf.pool.store import Store
from daf.saved_tensors.ledger import Ledger, Sources
from daf.saved_tensors.packer import Packer
from daf.saved_tensors.provenance import Provenance
from daf.saved_tensors.sites import SiteTracker
from daf.torch_compat.parameter_reads import ParameterReads


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


class SavedTensorState(NamedTuple):
    """The coder, the ledger, and where and from what saved tensors came."""

    coder: Coder
    packer: Packer
    ledger: Ledger
    sources: Sources
    tracker: SiteTracker
    provenance: Provenance
    evictions: Evictions
    scratch: Scratch
    parameter_reads: ParameterReads
    proven_recipes: dict[Hashable, bool]  # by site and operations: whether they repeat themselves
    sign_readers: dict[Site, tuple[Need, Site]]  # who else saved it, where that is computed again
