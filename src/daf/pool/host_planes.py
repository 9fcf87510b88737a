"""Planes of codes on a device that wait in pinned host memory until backward wants them.

A tensor's planes and headers are one run of words. They are written on the device, travel out
beside the computation, and come back in the reverse order of their writing, as early as there is
room: the newest stay where they are, so that the first ones backward wants need not travel at
all. What is on the device, on its way either way, is bounded by ``staging_bytes``; where that is
reached, the device itself waits for the oldest copy, the host for none.

Memory on the device belongs to one stream (``stream_order``), which is told to come after a copy
before its memory is let go of. After DAF (arXiv 2507.07149, collaborative packing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from daf.core.code_format import WORD_BYTES, code_bytes, words_per_plane
from daf.core.units import pinned_bytes
from daf.kernels.triton.planes import DevicePlanes, flat_planes
from daf.pool.record_store import RecordStore
from daf.pool.transfers import CudaTransfers, Transfers
from daf.torch_compat.stream_order import HomeStream, Streams, streams_of


class Record:
    """One tensor's words: on the device, on the host, or on both."""

    def __init__(self, number: int, count: int, bits: int, headers: bool) -> None:
        self.number = number
        self.count = count
        self.bits = bits
        self.headers = headers
        self.on_device: Tensor | None = None
        self.host: Tensor | None = None
        self.packing: Future[Tensor] | None = None  # the host's words, once a thread has made them
        self.leaving: Any = None  # the copy out reads on_device until then
        self.arriving: Any = None  # the copy back writes on_device until then
        self.readers = 0
        self.was_read = False

    @property
    def nbytes(self) -> int:
        """Of planes and headers."""
        return code_bytes(self.count, self.bits, headers=self.headers)

    @property
    def is_there(self) -> bool:
        """Could it be fetched now, without waiting for a thread, or telling what failed there?"""
        packing = self.packing
        is_packed = packing is not None and packing.done() and packing.exception() is None
        return self.host is not None or is_packed

    def planes(self) -> DevicePlanes:
        """What is on the device, as kernels take it."""
        assert self.on_device is not None
        split = self.bits * words_per_plane(self.count)
        region = self.on_device[:split].view(self.bits, -1)
        pairs = self.on_device[split:] if self.headers else None
        return flat_planes(region, pairs, self.count, self.bits)


class HostPlanes:
    """``DevicePlaneTensor`` for planes that travel: nothing of them is ever given up."""

    def __init__(self, store: HostStore, record: Record) -> None:
        self._store = store
        self._record = record

    @property
    def nbytes(self) -> int:
        """0: what passes through the device is counted by its store."""
        return 0

    @property
    def device(self) -> torch.device:
        """Where kernels write and read them."""
        return self._store.device

    @contextmanager
    def writing(self) -> Iterator[DevicePlanes]:
        """Where to write, on the current stream, once."""
        with self.filling() as planes:
            yield planes
        self.seal()

    @contextmanager
    def filling(self) -> Iterator[DevicePlanes]:
        """The same for who writes only some of it, or is not the last."""
        with self._store.home.ordered():
            yield self._record.planes()

    def seal(self) -> None:
        """All of it has been written: it may leave."""
        self._store.send(self._record)

    @contextmanager
    def pinned(self) -> Iterator[DevicePlanes]:
        """Read it, on the current stream; it stays on the device while inside."""
        with self._store.reading(self._record) as planes:
            yield planes

    def __del__(self) -> None:
        self._store.drop(self._record)


class HostStore(RecordStore[Record]):
    """Words of one device's codes, on the host and passing through the device; any thread."""

    def __init__(
        self,
        device: torch.device,
        staging_bytes: int,
        *,
        transfers: Transfers | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Hold nothing yet.

        Args:
            device: where kernels write and read.
            staging_bytes: the most to hold there; a code that is larger is taken alone.
            transfers: of the device; by default PyTorch's.
            streams: of the device; by default PyTorch's.

        Raises:
            PlatformError: there is no such device.
        """
        super().__init__()
        self.device = device
        self.staging_bytes = staging_bytes
        self.transfers = transfers or CudaTransfers(device)
        self.home = HomeStream(streams or streams_of(device))
        self.on_moved: Callable[[], None] = lambda: None  # there may be more on the device now
        self.on_read: Callable[[], None] = lambda: None
        self.last_copy: Any = None  # of what was sent
        self._live: dict[int, Record] = {}
        self._numbers = 0
        self._device_bytes = 0
        self._stored_bytes = 0
        self.stored_peak_bytes = 0
        self.pinned_bytes = 0
        self.taken_bytes = 0  # ever
        self.fetched_bytes = 0  # ever
        self.reads = 0  # ever
        # Of these, how many were asked for before their words had come. The host asks well before
        # the device reads, so that a device waits for fewer.
        self.late_reads = 0

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: being written, leaving, come back, or not gone yet."""
        with self._lock:
            self._drain()
            return self._device_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes that live, all of which are on the host or on their way."""
        with self._lock:
            self._drain()
            return self._stored_bytes

    def reset_peak(self) -> None:
        """Start the peak anew from what is stored now."""
        self.stored_peak_bytes = self.stored_bytes

    # --- out --------------------------------------------------------------------------------

    def allocate_planes(
        self,
        count: int,
        bits: int,
        *,
        minimum_bits: int | None = None,  # noqa: ARG002 - nothing is given up
        importance: Sequence[float] | None = None,  # noqa: ARG002
        headers: bool = True,
        tag: int = 0,  # noqa: ARG002
    ) -> HostPlanes:
        """Room to write ``bits`` planes of ``count`` elements in, on the device.

        Raises:
            torch.OutOfMemoryError: the device has none, even if all that can be fetched went.
        """
        with self._lock:
            record = self._entered(count, bits, headers)
            try:
                self._take_room(record)
            except RuntimeError:
                self._forget(record)
                raise
        self.on_moved()
        return HostPlanes(self, record)

    def packed_elsewhere(self, count: int, bits: int, packing: Future[Tensor]) -> HostPlanes:
        """Planes whose words (int32, pinned, headers last) a thread makes on the host."""
        with self._lock:
            record = self._entered(count, bits, True)
            record.packing = packing
        return HostPlanes(self, record)

    def _entered(self, count: int, bits: int, headers: bool) -> Record:
        self._drain()
        record = Record(self._numbers, count, bits, headers)
        self._numbers += 1
        self._live[record.number] = record
        self._stored_bytes += record.nbytes
        self.pinned_bytes += pinned_bytes(record.nbytes)
        self.taken_bytes += record.nbytes
        self.stored_peak_bytes = max(self.stored_peak_bytes, self._stored_bytes)
        return record

    def send(self, record: Record) -> None:
        """It was written: begin its way out. Where the host has no memory, it stays."""
        with self._lock, self.home.at_home():
            assert record.on_device is not None
            self.last_copy = None
            try:
                record.host, record.leaving = self.transfers.out(record.on_device)
            except RuntimeError:  # nothing pinned is left; the device holds it until it is dropped
                return
            self.last_copy = record.leaving

    # --- back -------------------------------------------------------------------------------

    @contextmanager
    def reading(self, record: Record) -> Iterator[DevicePlanes]:
        """Its planes on the device, for the current stream, while inside."""
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
        """Waits for the thread that packs it, if that is not done."""
        if record.host is None:
            assert record.packing is not None
            record.host = record.packing.result()
        return record.host

    def _fetch(self, record: Record, words: Tensor) -> None:
        """Into room that it has."""
        assert record.on_device is not None
        with self.home.at_home():
            record.arriving = self.transfers.back(words, record.on_device)
        record.was_read = False
        self.fetched_bytes += record.nbytes

    def _fetch_before(self, number: int) -> None:
        """Begin to fetch what backward will want next, as far as there is room."""
        for each, record in reversed(self._live.items()):
            if each >= number or record.on_device is not None or not record.is_there:
                continue
            if not self._make_room(record, number):
                return
            words = self._words_on_host(record)
            try:
                self._place(record)
            except RuntimeError:  # no memory for it now; it is fetched when it is wanted
                return
            self._fetch(record, words)

    # --- room -------------------------------------------------------------------------------

    def _take_room(self, record: Record) -> None:
        """Memory on the device for it, within the bound where that is possible."""
        while self._device_bytes + record.nbytes > self.staging_bytes:
            if not self._let_go_of_one():
                break
        try:
            self._place(record)
        except RuntimeError:
            if not self._let_go_of_one():
                raise
            while self._let_go_of_one():
                pass
            self._place(record)

    def _make_room(self, wanted: Record, reading: int) -> bool:
        """Within the bound, for what is wanted next. Codes stay alive where backward will run once
        more (``retain_graph``): those that were read go, if they are enough, what was above first.
        """
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
        """Of what was read already, or else of what will be wanted last; False: nothing may go."""
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
        """Its memory goes back to the allocator, in home's order."""
        with self.home.at_home():
            for ticket in (record.leaving, record.arriving):
                if ticket is not None and not self.transfers.is_done(ticket):
                    self.transfers.order(ticket)
        record.leaving = record.arriving = record.on_device = None
        self._device_bytes -= record.nbytes

    def drop_staged(self) -> None:
        """Let go of all on the device that can be fetched again."""
        with self._lock:
            self._drain()
            while self._let_go_of_one():
                pass

    # --- ends -------------------------------------------------------------------------------

    def _forget(self, record: Record) -> None:
        if self._live.pop(record.number, None) is None:
            return
        self._stored_bytes -= record.nbytes
        self.pinned_bytes -= pinned_bytes(record.nbytes)
        if record.on_device is not None:
            self._leave_device(record)
