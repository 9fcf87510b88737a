"""Planes of a device's codes that wait in pinned host memory until backward reads them."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor

from daf.core.code_format import WORD_BYTES, code_bytes, words_per_plane
from daf.core.policy import Treatment
from daf.core.units import pinned_bytes
from daf.kernels import PageFields
from daf.kernels.cpu.backend import CpuBackend
from daf.kernels.normalisation import CodedValues, Encoding
from daf.kernels.triton.planes import DevicePlanes, flat_planes
from daf.pool.record_store import RecordStore
from daf.pool.store import PlaneOptions
from daf.pool.transfers import Transfers
from daf.pool.views import PlaneView
from daf.torch_compat.stream_order import HomeStream, Streams, streams_of


class Record:
    """One tensor's words: on the device, on the host, or on both."""

    def __init__(self, number: int, count: int, bits: int, headers: bool) -> None:
        self.number, self.count = number, count
        self.bits, self.headers = bits, headers
        self.on_device: Tensor | None = None
        self.host: Tensor | None = None
        self.packing: Future[Tensor] | None = None  # the host's words, once packed
        self.leaving: Any = None  # the copy out reads on_device until this is done
        self.arriving: Any = None  # the copy back writes on_device until this is done
        self.readers, self.was_read = 0, False

    @property
    def nbytes(self) -> int:
        """Bytes of planes and headers."""
        return code_bytes(self.count, self.bits, headers=self.headers)

    @property
    def is_there(self) -> bool:
        """True if it can be fetched without waiting for a thread or raising its error."""
        packing = self.packing
        is_packed = packing is not None and packing.done() and packing.exception() is None
        return self.host is not None or is_packed

    def planes(self) -> DevicePlanes:
        """The words on the device, as kernels take them."""
        assert self.on_device is not None
        split = self.bits * words_per_plane(self.count)
        region = self.on_device[:split].view(self.bits, -1)
        pairs = self.on_device[split:] if self.headers else None
        return flat_planes(region, pairs, self.count, self.bits)


class HostPlanes:
    """The ``DevicePlaneTensor`` of planes that travel; none is ever evicted."""

    nbytes = 0  # the store counts what passes through the device

    def __init__(self, store: "HostStore", record: Record) -> None:
        self._store, self._record = store, record

    @contextmanager
    def filling(self) -> Iterator[DevicePlanes]:
        """Yield where to write a part, or before others do."""
        with self._store.home.ordered():
            yield self._record.planes()

    def seal(self) -> None:
        """End writing; the words may leave."""
        self._store.send(self._record)

    def pinned(self) -> AbstractContextManager[DevicePlanes]:
        """Yield the planes for reading on the current stream; they stay on the device meanwhile."""
        return self._store.reading(self._record)

    def __del__(self) -> None:
        self._store.drop(self._record)


class HostStore(RecordStore[Record]):
    """Words of one device's codes, on the host and passing through the device; thread-safe."""

    def __init__(
        self,
        device: torch.device,
        staging_bytes: int,
        *,
        transfers: Transfers | None = None,
        streams: Streams | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.staging_bytes = staging_bytes  # the most on the device; a larger code is taken alone
        self.transfers = transfers or Transfers(device)
        self.home = HomeStream(streams or streams_of(device))
        self.on_moved: Callable[[], None] = lambda: None  # device_bytes may have grown
        self.on_read: Callable[[], None] = lambda: None
        self.last_copy: Any = None  # out
        self._live: dict[int, Record] = {}
        self._numbers, self._device_bytes = 0, 0
        self.pinned_bytes = 0
        self.fetched_bytes = 0  # in total
        self.reads = 0  # in total
        # Reads asked for before their words had arrived; the device itself waits for fewer.
        self.late_reads = 0

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: being written, leaving, fetched, or not yet freed."""
        with self._lock:
            self._drain()
            return self._device_bytes

    def allocate_planes(self, count: int, bits: int, **options: Unpack[PlaneOptions]) -> HostPlanes:
        """Allocate ``bits`` planes of ``count`` elements on the device, never evicted.

        torch.OutOfMemoryError: it has no room, even without all that can be fetched again.
        """
        with self._lock:
            record = self._entered(count, bits, options.get("headers", True))
            try:
                self._take_room(record)
            except RuntimeError:
                self._forget(record)
                raise
        self.on_moved()
        return HostPlanes(self, record)

    def packed_elsewhere(self, count: int, bits: int, packing: Future[Tensor]) -> HostPlanes:
        """Return planes whose words (int32, pinned, headers last) a thread packs on the host."""
        with self._lock:
            record = self._entered(count, bits, True)
            record.packing = packing
        return HostPlanes(self, record)

    def _entered(self, count: int, bits: int, headers: bool) -> Record:
        self._drain()
        record = Record(self._numbers, count, bits, headers)
        self._numbers += 1
        self._live[record.number] = record
        self._store(record.nbytes)
        self.pinned_bytes += pinned_bytes(record.nbytes)
        self.taken_bytes += record.nbytes
        return record

    def send(self, record: Record) -> None:
        """Begin to copy a written record out; it stays on the device if the host has no memory."""
        with self._lock, self.home.at_home():
            assert record.on_device is not None
            self.last_copy = None
            try:
                record.host, record.leaving = self.transfers.out(record.on_device)
            except RuntimeError:  # no pinned memory is left; it stays on the device
                return
            self.last_copy = record.leaving

    @contextmanager
    def reading(self, record: Record) -> Iterator[DevicePlanes]:
        """Yield its planes on the device, for the current stream."""
        with self._lock:
            self._drain()
            if record.on_device is None:
                words = self._words_on_host(record)
                self._take_room(record)
                self._fetch(record, words)
            record.readers += 1
            self._fetch_before(record.number)
            arriving = record.arriving
            self.reads += 1
            self.late_reads += arriving is not None and not self.transfers.is_done(arriving)
        self.on_read()
        self.on_moved()
        try:
            with self.home.ordered():
                if arriving is not None:
                    self.transfers.order(arriving)
                yield record.planes()
        finally:
            with self._lock:
                record.readers -= 1
                record.was_read = True
                record.arriving = None  # home comes after the reader, which came after the copy

    def _words_on_host(self, record: Record) -> Tensor:
        if record.host is None:
            assert record.packing is not None
            record.host = record.packing.result()
        return record.host

    def _fetch(self, record: Record, words: Tensor) -> None:
        assert record.on_device is not None
        with self.home.at_home():
            record.arriving = self.transfers.back(words, record.on_device)
        record.was_read = False
        self.fetched_bytes += record.nbytes

    def _fetch_before(self, number: int) -> None:
        for each, record in reversed(self._live.items()):
            if each >= number or record.on_device is not None or not record.is_there:
                continue
            if not self._make_room(record, number):
                return
            words = self._words_on_host(record)
            try:
                self._place(record)
            except RuntimeError:  # no memory for it now; it is fetched when it is read
                return
            self._fetch(record, words)

    def _take_room(self, record: Record) -> None:
        while self._device_bytes + record.nbytes > self.staging_bytes and self._let_go_of_one():
            pass
        try:
            self._place(record)
        except RuntimeError:
            if not self._let_go_of_one():
                raise
            while self._let_go_of_one():
                pass
            self._place(record)

    def _make_room(self, wanted: Record, reading: int) -> bool:
        """Free room within the bound for the record read next; True if there is enough."""
        # Records already read go if they suffice, those above ``reading`` first: codes stay alive
        # where backward runs again (``retain_graph``).
        excess = self._device_bytes + wanted.nbytes - self.staging_bytes
        if excess <= 0:
            return True
        were_read = [each for each in self._live.values() if each.was_read and self._may_go(each)]
        may_go = [each for each in were_read if not wanted.number < each.number < reading]
        if excess > sum(each.nbytes for each in may_go):
            return False
        for each in sorted(may_go, key=lambda each: (each.number < reading, each.number)):
            if excess > 0:
                self._leave_device(each)
                excess -= each.nbytes
        return True

    def _place(self, record: Record) -> None:
        record.on_device = self._empty(record.nbytes // WORD_BYTES)
        self._device_bytes += record.nbytes

    def _empty(self, words: int) -> Tensor:
        with self.home.at_home():
            return torch.empty(words, dtype=torch.int32, device=self.device)

    def _let_go_of_one(self) -> bool:
        """Free one record already read, or else the one needed last; False if none may go."""
        may_go = (each for each in self._live.values() if self._may_go(each))
        victim = min(may_go, key=lambda each: (not each.was_read, each.number), default=None)
        if victim is None:
            return False
        self._leave_device(victim)
        return True

    @staticmethod
    def _may_go(record: Record) -> bool:
        return record.on_device is not None and record.host is not None and not record.readers

    def _leave_device(self, record: Record) -> None:
        with self.home.at_home():
            for ticket in (record.leaving, record.arriving):
                if ticket is not None and not self.transfers.is_done(ticket):
                    self.transfers.order(ticket)
        record.leaving = record.arriving = record.on_device = None
        self._device_bytes -= record.nbytes

    def drop_staged(self) -> None:
        """Free all device memory whose content can be fetched again."""
        with self._lock:
            self._drain()
            while self._let_go_of_one():
                pass

    def _forget(self, record: Record) -> None:
        if self._live.pop(record.number, None) is None:
            return
        self._stored_bytes -= record.nbytes
        self.pinned_bytes -= pinned_bytes(record.nbytes)
        if record.on_device is not None:
            self._leave_device(record)


def words_for(count: int, bits: int, *, pinned: bool) -> Tensor:
    """Allocate int32 words of a code: planes first, headers behind, as HostStore keeps them.

    A device can copy ``pinned`` ones by itself. RuntimeError: no pinned memory is left.
    """
    return torch.empty(code_bytes(count, bits) // WORD_BYTES, dtype=torch.int32, pin_memory=pinned)


def encode_on_host(
    tensor: Tensor, treatment: Treatment, key: int, words: Tensor | None = None
) -> Tensor:
    """Encode a dense host tensor as *rotated* or *minmax* into ``words`` (None: new ones).

    These are the bytes that the device would have made.
    """
    count = tensor.numel()
    if words is None:
        words = words_for(count, treatment.bits, pinned=False)
    planes = PlaneView(PageFields.flat(words.data_ptr(), count, treatment.bits))
    CpuBackend().encode_values(CodedValues(planes, treatment, key, count), Encoding(tensor))
    return words
