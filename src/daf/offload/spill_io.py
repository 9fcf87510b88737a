"""One spilled storage to the file and back: whole, checked, in chunks; runs on a thread."""

from __future__ import annotations

import ctypes
import errno
import zlib
from typing import Any

from torch import Tensor

from daf.core.errors import SpillError
from daf.core.units import format_bytes
from daf.offload.spill_file import SpillFile

CHUNK_BYTES = 4 * 2**20


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
