"""Spilling: a saved tensor's bytes wait on disk until backward reads them, bit for bit."""

import errno
import math
import os
import shutil
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from daf.core.errors import SavedTensorError
from daf.core.units import format_bytes
from daf.offload.spill_file import (
    DEFAULT_QUOTA_SHARE,
    Extents,
    SpillFile,
    open_disk_file,
    read_storage,
    write_storage,
)
from daf.pool.record_store import RecordStore

_MIB = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SpillWarning(RuntimeWarning):
    """The disk is full or fails; tensors stay in memory instead."""


@dataclass(frozen=True, slots=True)
class SpillOptions:
    """Where to spill and how much (bytes)."""

    directory: str | Path | None = None  # None: the system's place for temporary files
    quota_bytes: int | None = None  # of the file; None: half of what is free there
    in_flight_bytes: int = 64 * _MIB  # waiting to be written; a larger tensor is taken, alone
    read_ahead_bytes: int = 64 * _MIB  # likewise read ahead
    allow_memory: bool = False  # also a directory in memory (tmpfs), refused otherwise


class SpillRecord:
    """One spilled storage; ``content`` is kept until it is on disk, for good if that failed."""

    def __init__(self, space: "_Space", tensor: Tensor, site: str, offset: int) -> None:
        self.nbytes = tensor.untyped_storage().nbytes()
        self.site, self.offset = site, offset
        self.content: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.checksum, self.changed = 0, False
        self.number = -1
        self.users, self.loads = 0, 0
        self.space = space
        self.writing: Future[int] | None = None
        # No longer counted; while a finalizer runs, another thread may still reach the record.
        self.is_forgotten = False
        self.on_release: Callable[[SpillRecord], None] | None = None

    def __del__(self) -> None:
        if self.on_release is not None:
            self.on_release(self)


class _Space:
    """One file with its map and its two threads; a forked child begins another."""

    def __init__(self, file: SpillFile, quota_bytes: int) -> None:
        self.file = file
        self.extents = Extents(quota_bytes)
        self.process = os.getpid()
        self.writer = ThreadPoolExecutor(1, "daf-spill-write")
        self.reader = ThreadPoolExecutor(1, "daf-spill-read")

    def close(self) -> None:
        for threads in (self.writer, self.reader):
            threads.shutdown(cancel_futures=True)
        self.file.close()


class SpillStore(RecordStore[SpillRecord]):
    """Writes storages to disk and reads them back, from any threads; the first makes the file."""

    def __init__(
        self, options: SpillOptions | None = None, open_file: Callable[[], SpillFile] | None = None
    ) -> None:
        super().__init__()
        self._options = options or SpillOptions()
        self._open_file = open_file or partial(
            open_disk_file, self._options.directory, allow_memory=self._options.allow_memory
        )
        self._space: _Space | None = None
        self.bound(None)
        self._in_flight: deque[weakref.ref[SpillRecord]] = deque()
        self._live: dict[int, weakref.ref[SpillRecord]] = {}
        self._ahead: dict[int, tuple[int, Future[Tensor]]] = {}
        self._shared: dict[int, Tensor] = {}  # the last one read, by number, if soon read again
        self._numbers, self._waiting_bytes = 0, 0
        self._fallen_back_bytes, self._broken = 0, False
        self._warned = False

    @property
    def in_memory_bytes(self) -> int:
        """Bytes held in memory: not yet written, read ahead, or impossible to write."""
        with self._lock:
            self._drain()
            ahead = sum(size for size, _ in self._ahead.values())
            shared = sum(each.nbytes for each in self._shared.values())
            return self._waiting_bytes + self._fallen_back_bytes + ahead + shared

    def reset_peak(self) -> None:
        """Restart the peak from what is on disk now."""
        self.reap()
        super().reset_peak()

    def bound(self, spare_bytes: int | None) -> None:
        """Bound pending writes and reading ahead to half of ``spare_bytes`` each; None: no bound.

        The options always bound both. With 0, spilling waits for each write.
        """
        options = self._options
        half = math.inf if spare_bytes is None else max(0, spare_bytes) // 2
        self._in_flight_bytes = int(min(options.in_flight_bytes, half))
        self._read_ahead_bytes = int(min(options.read_ahead_bytes, half))

    def put(
        self, tensor: Tensor, site: str, on_taken: Callable[[], None] = lambda: None
    ) -> SpillRecord | None:
        """Begin to spill the whole storage of a strided CPU tensor; None: no room, keep it.

        Returns once no more than ``in_flight_bytes``, or what ``bound`` left of them, wait to be
        written. ``site`` names it in messages; ``on_taken`` is called once it waits. SpillError:
        no file can be made.
        """
        with self._lock:
            space = self._open()
            self._reap()
            size = tensor.untyped_storage().nbytes()
            offset = None if self._broken or not size else space.extents.take(size)
            if offset is None:
                self._explain(f"its {format_bytes(space.extents.quota_bytes)} are full")
                return None
            record = self._begin(space, tensor, site, offset)
        on_taken()
        self._wait_for_room()
        return record

    def _begin(self, space: _Space, tensor: Tensor, site: str, offset: int) -> SpillRecord:
        record = SpillRecord(space, tensor, site, offset)
        record.number = self._numbers
        self._numbers += 1
        record.on_release = self.drop
        self._waiting_bytes += record.nbytes
        self.taken_bytes += record.nbytes
        assert record.content is not None
        # The job holds the storage, so its memory stays whatever becomes of the record.
        record.writing = space.writer.submit(write_storage, space.file, record.content, offset)
        self._in_flight.append(weakref.ref(record))
        self._live[record.number] = weakref.ref(record)
        return record

    def _wait_for_room(self) -> None:
        while True:
            with self._lock:
                self._reap()
                oldest = self._oldest()
                if self._waiting_bytes <= self._in_flight_bytes or oldest is None:
                    return
                writing = oldest.writing
            assert writing is not None
            wait([writing])

    def _oldest(self) -> SpillRecord | None:
        while self._in_flight:
            record = self._in_flight[0]()
            if record is not None and not record.is_forgotten:
                return record
            self._in_flight.popleft()
        return None

    def reap(self) -> None:
        """Free storages that are on disk, on a thread that saves or reads tensors.

        No operator runs on it now, so a change in place since the writing began is in the version.
        """
        with self._lock:
            self._reap()

    def _reap(self) -> None:
        self._drain()
        while (record := self._oldest()) is not None:
            writing = record.writing
            if writing is None or not writing.done():
                return
            self._in_flight.popleft()
            self._finish(record, writing)

    def _finish(self, record: SpillRecord, writing: Future[int]) -> None:
        assert record.content is not None
        self._waiting_bytes -= record.nbytes
        record.writing = None
        problem = writing.exception()
        if isinstance(problem, OSError):
            self._fall_back(record, problem)
            return
        record.checksum = writing.result()
        record.changed = record.content._version != record.version
        record.content = None
        self._store(record.nbytes)

    def _fall_back(self, record: SpillRecord, problem: OSError) -> None:
        """Keep the record in memory; its failed place is not reused, other places are."""
        self._fallen_back_bytes += record.nbytes
        extents = record.space.extents
        if problem.errno in _FULL:
            extents.quota_bytes = min(extents.quota_bytes, extents.end)
        else:
            self._broken = True
        self._explain(f"it answered: {problem.strerror or problem}")

    def _explain(self, what: str) -> None:
        if self._warned:
            return
        self._warned = True
        place = self._options.directory or tempfile.gettempdir()
        warnings.warn(
            f"spilling to {place} came to an end: {what}; tensors that find no room there stay in "
            "memory (this is said once); free the disk, name another directory or raise the quota",
            SpillWarning,
            stacklevel=2,
        )

    def load(self, record: SpillRecord) -> torch.UntypedStorage:
        """Return the storage: its own if still resident, else a new one with the same bytes.

        SavedTensorError: it was changed in place before it was written. SpillError: it cannot be
        read, or reads differently from what was written.
        """
        with self._lock:
            self._reap()
            content = record.content
            if record.changed or (content is not None and content._version != record.version):
                raise SavedTensorError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation after it was saved at {record.site}; do not change it in "
                    "place between forward and backward, or clone it before"
                )
            if content is not None:
                return content.untyped_storage()
            if (shared := self._shared.pop(record.number, None)) is not None:
                return self._share(record, shared)
            self._shared.clear()
            _, reading = self._ahead.pop(record.number, (0, None))
            reading = reading or self._begin_read(record)
            self._read_ahead(record)
        found = reading.result()
        with self._lock:
            return self._share(record, found)

    def _share(self, record: SpillRecord, found: Tensor) -> torch.UntypedStorage:
        record.loads += 1
        more = record.users > 1 and record.loads % record.users != 0
        self._shared = {record.number: found} if more else {}
        return found.untyped_storage()

    def _begin_read(self, record: SpillRecord) -> Future[Tensor]:
        buffer = torch.empty(record.nbytes, dtype=torch.uint8)
        space = record.space if record.space.process == os.getpid() else self._open()
        what = (record.space.file, buffer, record.offset, record.checksum, record.site)
        return space.reader.submit(read_storage, *what)

    def _read_ahead(self, record: SpillRecord) -> None:
        """Begin to read those that backward reads next: the ones spilled before."""
        room = self._read_ahead_bytes - sum(size for size, _ in self._ahead.values())
        for number in range(record.number - 1, -1, -1):
            reference = self._live.get(number)
            before = reference() if reference is not None else None
            if before is None:
                if not any(each < number for each in self._live):
                    return
                continue
            if before.content is not None or number in self._ahead:
                continue
            room -= before.nbytes
            if room < 0:
                return
            try:
                reading = self._begin_read(before)
            except RuntimeError:  # no memory for it now; it is read when backward asks
                return
            self._ahead[number] = (before.nbytes, reading)

    def drop_read_ahead(self) -> None:
        """Drop what was read ahead; it is read again."""
        with self._lock:
            for _, reading in self._ahead.values():
                reading.cancel()
            self._ahead.clear()
            self._shared.clear()

    def _forget(self, record: SpillRecord) -> None:
        record.is_forgotten = True
        self._live.pop(record.number, None)
        _, reading = self._ahead.pop(record.number, (0, None))
        if reading is not None:
            reading.cancel()
        self._shared.pop(record.number, None)
        if record.writing is not None:
            # Even if it runs: the only writer reuses this place no earlier than afterwards.
            record.writing.cancel()
            self._waiting_bytes -= record.nbytes
        elif record.content is not None:
            self._fallen_back_bytes -= record.nbytes
            return
        else:
            self._stored_bytes -= record.nbytes
        record.space.extents.give_back(record.offset, record.nbytes)

    def close(self) -> None:
        """End the threads and free the file's space; live records are lost."""
        with self._lock:
            space, self._space = self._space, None
        if space is not None:
            space.close()

    def _open(self) -> _Space:
        if self._space is None or self._space.process != os.getpid():
            file, quota_bytes = self._open_file(), self._options.quota_bytes
            if quota_bytes is None:
                place = self._options.directory or tempfile.gettempdir()
                quota_bytes = int(DEFAULT_QUOTA_SHARE * shutil.disk_usage(place).free)
            self._space = _Space(file, quota_bytes)
        return self._space
