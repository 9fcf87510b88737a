"""The ledger: the bytes that plain autograd would hold, and those that are held instead.

Bytes leave with the last reference to their object, so it is exact at any moment.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from daf.saved_tensors.sites import SiteRecord
from daf.torch_compat.autograd_graph import (
    StorageReference,
    bytes_of,
    storage_holders,
    strided_parts,
)

Found = TypeVar("Found", bound=object)


@dataclass(eq=False)
class Ledger:
    """Bytes now and at peak: what plain PyTorch would hold, and what DAF holds.

    While any code lives, codes count as their store counts itself: with a pool's free pages and
    records, without evicted planes. ``reported_bytes`` are the holdings' own, as each was when it
    began. ``_waiting_bytes`` returns what waits to be spilled or was read back early,
    ``_spilled_bytes`` what was ever spilled or sent to the host.
    """

    _stored_bytes: Callable[[], int] | None = None
    _waiting_bytes: Callable[[], int] = lambda: 0
    _spilled_bytes: Callable[[], int] = lambda: 0
    _stored_reported_bytes: int = 0
    plain_bytes: int = 0
    plain_peak_bytes: int = 0
    reported_bytes: int = 0
    held_peak_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that DAF holds now."""
        reported_bytes = self.reported_bytes + self._waiting_bytes()
        if self._stored_bytes is None or not self._stored_reported_bytes:
            return reported_bytes
        return reported_bytes - self._stored_reported_bytes + self._stored_bytes()

    def note_held(self) -> None:
        """Note that the waiting bytes have grown."""
        self.held_peak_bytes = max(self.held_peak_bytes, self.held_bytes)

    def add_plain(self, count: int) -> None:
        """Count bytes that plain autograd begins to hold; negative: frees."""
        self.plain_bytes += count
        self.plain_peak_bytes = max(self.plain_peak_bytes, self.plain_bytes)

    def add_held(self, count: int, *, in_store: bool) -> None:
        """Count bytes that DAF begins to hold; negative: frees."""
        self.reported_bytes += count
        if in_store:
            self._stored_reported_bytes += count
        if count > 0:
            self.note_held()

    @contextmanager
    def counted_at(self, record: SiteRecord) -> Iterator[None]:
        """Count at a site what plain PyTorch and DAF begin to hold inside, and what spills."""
        plain, held, spilled = self.plain_bytes, self.reported_bytes, self._spilled_bytes()
        yield
        record.plain_bytes += self.plain_bytes - plain
        record.held_bytes += self.reported_bytes - held
        record.spilled_bytes += self._spilled_bytes() - spilled

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is alive now."""
        self.plain_peak_bytes = self.plain_bytes
        self.held_peak_bytes = self.held_bytes


class Holding:
    """Bytes that DAF holds, in the ledger for as long as this object lives."""

    __slots__ = ("__weakref__", "_in_store", "_ledger", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int, *, in_store: bool = False) -> None:
        self._ledger, self._in_store = ledger, in_store
        self.nbytes = 0  # an interrupt may come before the bytes are counted
        ledger.add_held(nbytes, in_store=in_store)
        self.nbytes = nbytes

    def __del__(self) -> None:
        if getattr(self, "nbytes", 0):
            self._ledger.add_held(-self.nbytes, in_store=self._in_store)


class Unmade(NamedTuple):
    """A storage that only plain PyTorch makes and holds; ``instead`` are sources in its place."""

    nbytes: int
    instead: "tuple[Source, ...]" = ()


class Plain:
    """A storage that plain autograd holds, in the ledger for as long as this object lives."""

    __slots__ = ("__weakref__", "_ledger", "source")

    def __init__(self, ledger: Ledger, source: "Source | Unmade") -> None:
        self._ledger = ledger
        ledger.add_plain(source.nbytes)
        self.source = source

    def __del__(self) -> None:
        if hasattr(self, "source"):  # else an interrupt came before it was counted
            self._ledger.add_plain(-self.source.nbytes)


class Source:
    """A storage from which tensors were saved or held; alive while one of them is.

    Its weak reference reserves the address, so an equal address means the same storage. Keys of
    ``remember`` and ``recall`` are of version, geometry and treatment.
    """

    __slots__ = ("__weakref__", "_held", "_ledger", "_plain", "_storage", "nbytes")

    def __init__(self, ledger: Ledger, storage: torch.UntypedStorage) -> None:
        self._ledger = ledger
        self._storage = StorageReference(storage)
        self._held: dict[Hashable, weakref.ref[object]] = {}
        self._plain: weakref.ref[Plain] | None = None
        self.nbytes = storage.nbytes()

    def references(self) -> int:
        """Return the number of tensors that refer to the storage now."""
        if self._storage.expired():
            return 0
        return storage_holders(self._storage) - _wrapper_references()

    def plain(self) -> Plain:
        """Count the storage as plain autograd's, once however many tensors on it are saved."""
        plain = self._plain() if self._plain is not None else None
        if plain is None:
            plain = Plain(self._ledger, self)
            self._plain = weakref.ref(plain)
        return plain

    def remember(self, key: Hashable, held: object) -> None:
        """Let ``held`` stand for the content of ``key``, as long as it lives."""
        self._held[key] = weakref.ref(held)

    def recall(self, key: Hashable, kind: type[Found]) -> Found | None:
        """Return what stands for the content of ``key``, if it is alive."""
        reference = self._held.get(key)
        found = reference() if reference is not None else None
        return found if isinstance(found, kind) else None

    def knows(self, key: Hashable) -> bool:
        """True if anything alive stands for the content of ``key``."""
        return self.recall(key, object) is not None


class Sources:
    """The sources alive now, by storage; external storages have none."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._alive: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()
        self._external: dict[int, StorageReference] = {}

    def begin_step(self, external: Iterator[Tensor]) -> None:
        """Name the external storages, which are never coded or counted."""
        self._external = {}
        self.add_external(external)

    def add_external(self, tensors: Iterator[Tensor]) -> None:
        """Name more external tensors."""
        for tensor in tensors:
            for part in strided_parts(tensor):
                storage = part.untyped_storage()
                self._external[storage._cdata] = StorageReference(storage)

    def is_external(self, tensor: Tensor) -> bool:
        """True if a strided tensor lies in a parameter, a buffer or the caller's batch."""
        return tensor.untyped_storage()._cdata in self._external

    def of(self, tensor: Tensor) -> Source:
        """Return the source of a strided tensor."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if (source := self._alive.get(address)) is None:
            source = self._alive[address] = Source(self._ledger, storage)
        return source

    def kept_at(self, address: int, kind: type[Found]) -> Found | None:
        """Return what keeps the storage at this address, which lives, for backward; or None."""
        source = self._alive.get(address)
        return None if source is None else source.recall("kept by", kind)

    def of_parts(self, tensor: Tensor) -> tuple[Source, ...]:
        """Return the sources of the strided tensors that a tensor consists of."""
        return tuple(map(self.of, strided_parts(tensor)))

    def renew(self, tensor: Tensor) -> None:
        """Give the tensor's overwritten memory a new source: plain PyTorch would have two."""
        self._alive.pop(tensor.untyped_storage()._cdata, None)


@functools.cache
def _wrapper_references() -> int:
    """Return what PyTorch's count gains once Python knows a storage (1 in torch 2.13)."""
    storage = torch.UntypedStorage(4)  # type: ignore[no-untyped-call]  # torch.func wraps tensors
    return storage_holders(storage._cdata)


def gradient_bytes(parameter: Tensor) -> int:
    """Return the bytes of a parameter's gradient, dense or sparse; 0 without one."""
    return 0 if parameter.grad is None else bytes_of(parameter.grad)
