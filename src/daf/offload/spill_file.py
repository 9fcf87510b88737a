"""The file of spilled tensors, a map of its used parts, and a storage there and back: checked."""

import bisect
import ctypes
import errno
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from daf.core.errors import SpillError
from daf.core.units import format_bytes

ALIGNMENT_BYTES = 4096
CHUNK_BYTES = 4 * 2**20
DEFAULT_QUOTA_SHARE = 0.5  # of the space that is free when the file is made
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
# <fcntl.h>: _WRITE starts writing what is not on its way; _ALL also waits before and after.
_WRITE, _ALL = 2, 7
_ENDLESS = 2**63  # bytes: the quota bounds a file, not its map


class SpillFile:
    """An unnamed temporary file in a directory; every method may raise ``OSError``."""

    def __init__(self, directory: str | Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0, prefix="daf-spill-")  # noqa: SIM115 - lives with us
        self._descriptor = self._file.fileno()
        self._sync = _sync_file_range()

    def write(self, content: memoryview, offset: int) -> int:
        """Write at an offset and start the disk on it; return the bytes taken."""
        count = os.pwrite(self._descriptor, content, offset)
        if self._sync is not None:
            self._checked_sync(offset, count, _WRITE)
        return count

    def settle(self, offset: int, nbytes: int) -> None:
        """Wait until these bytes are on the disk, then drop them from the cache."""
        if self._sync is not None:
            self._checked_sync(offset, nbytes, _ALL)
        else:
            os.fsync(self._descriptor)
        self._forget(offset, nbytes)

    def read(self, into: memoryview, offset: int) -> int:
        """Read from an offset, leaving nothing in the cache; return the bytes read."""
        count = os.preadv(self._descriptor, [into], offset)
        self._forget(offset, count)
        return count

    def close(self) -> None:
        """Free the file's space."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def _forget(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _checked_sync(self, offset: int, nbytes: int, flags: int) -> None:
        assert self._sync is not None
        if self._sync(self._descriptor, offset, nbytes, flags) != 0:
            problem = ctypes.get_errno()
            if problem not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
                raise OSError(problem, os.strerror(problem))
            os.fsync(self._descriptor)


def _sync_file_range() -> "ctypes._NamedFuncPointer | None":
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def open_disk_file(directory: str | Path | None, *, allow_memory: bool) -> SpillFile:
    """Open an unnamed file in ``directory``; None: the system's place for temporary files.

    SpillError: the directory lies in memory (and ``allow_memory`` is False), no file can be made
    there, or the system has no positioned reads.
    """
    place = Path(tempfile.gettempdir() if directory is None else directory)
    if not hasattr(os, "preadv"):
        raise SpillError("asked to spill; this system has no positioned reads (preadv); replay")
    kind = file_system_of(place)
    if kind in _IN_MEMORY and not allow_memory:
        raise SpillError(
            f"asked to spill into {place}, which is a {kind}: it lies in memory, so nothing would "
            "be saved; name a directory on a disk, such as /var/tmp"
        )
    try:
        return SpillFile(place)
    except OSError as error:
        raise SpillError(
            f"asked to spill into {place}; no file can be made there: {error.strerror}; "
            "name another directory"
        ) from error


def file_system_of(place: Path) -> str:
    """Return the kind of file system that a path lies on (``"ext4"``); empty if unknown."""
    real = place.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    holding = [mount for mount in mounts if real.is_relative_to(mount)]
    return mounts[max(holding, key=lambda mount: len(mount.parts))] if holding else ""


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the whole storage of a CPU tensor; valid while the tensor lives."""
    storage = tensor.untyped_storage()
    array: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


def write_storage(file: SpillFile, content: Tensor, offset: int) -> int:
    """Write a storage at an offset; returns its checksum once it is on the disk."""
    view, checksum, before = _bytes_of(content), 0, None
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        _write_whole(file, chunk, offset + start)
        if before is not None:
            file.settle(*before)
        before = (offset + start, len(chunk))
    if before is not None:
        file.settle(*before)
    return checksum


def _write_whole(file: SpillFile, chunk: memoryview, offset: int) -> None:
    done = 0
    while done < len(chunk):
        count = file.write(chunk[done:], offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, "it takes no more bytes")
        done += count


def read_storage(file: SpillFile, into: Tensor, offset: int, checksum: int, site: str) -> Tensor:
    """Read a storage from an offset; SpillError if the disk fails or the checksum differs."""
    view, found = _bytes_of(into), 0
    where = f"the tensor saved at {site}, {format_bytes(len(view))} at offset {offset} of the file"
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        _read_whole(file, chunk, offset + start, where)
        found = zlib.crc32(chunk, found)
    if found != checksum:
        raise SpillError(
            f"asked for {where}: checksum {found:08x}, but {checksum:08x} was written; "
            "the disk or its memory is failing: spill elsewhere, or train without"
        )
    return into


def _read_whole(file: SpillFile, chunk: memoryview, offset: int, where: str) -> None:
    done = 0
    while done < len(chunk):
        try:
            count = file.read(chunk[done:], offset + done)
        except OSError as error:
            raise SpillError(
                f"asked for {where}: the disk answered: {error.strerror or error}; "
                "spill elsewhere, or train without"
            ) from error
        if count == 0:
            raise SpillError(
                f"asked for {where}: the file ends at {offset + done}; "
                "spill elsewhere, or train without"
            )
        done += count


class Extents:
    """Which parts of a file are free: the lowest that is large enough is taken."""

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.end = 0  # the file has been written up to here
        self._free = [(0, _ENDLESS)]  # (offset, bytes) by offset, never adjacent

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken, rounded up to whole pages."""
        return _ENDLESS - sum(size for _, size in self._free)

    def take(self, nbytes: int) -> int | None:
        """Take ``nbytes`` free bytes; returns their offset, or None if the quota has no room."""
        size = rounded(nbytes)
        place, (offset, free) = next(each for each in enumerate(self._free) if each[1][1] >= size)
        if offset + size > self.quota_bytes:
            return None
        self._free[place : place + 1] = [(offset + size, free - size)] if free > size else []
        self.end = max(self.end, offset + size)
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free these bytes."""
        end = offset + rounded(nbytes)
        place = bisect.bisect(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == end:
            end = sum(self._free.pop(place))
        if place and sum(self._free[place - 1]) == offset:
            place -= 1
            offset = self._free.pop(place)[0]
        self._free.insert(place, (offset, end - offset))


def rounded(nbytes: int) -> int:
    """Return a size in whole pages of the file."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
