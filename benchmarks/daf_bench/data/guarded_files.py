"""Files from anywhere, read in bounded memory and time: a file may lie about what it holds.

A hostile file costs at most 200 MB (CIFAR-100's training images: 500 MB) and a minute before it is
refused by name.
"""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError
from daf.files.atomic import open_regular

_MOST_INFLATION = 20  # of an archive above the next line's size
_INFLATED_BYTES = 32 * 10**6
_MOST_MEMBERS = 1000
_LONGEST_LINE = 10**6  # characters
_MOST_HOLES = 20  # a file's size ÷ what it takes on the disk
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others can ask for gigabytes
_ZIP_END, _ZIP64_END = b"PK\x05\x06", b"PK\x06\x07"
_LONGEST_ZIP_END = 22 + 2**16
_BLOCK = 1 << 20
# What damaged archives and headers make zipfile, zlib and NumPy raise.
_UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, SyntaxError),
    *(ArithmeticError, MemoryError, zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


def open_data(path: Path, inside: Path | None = None) -> io.FileIO:
    """Open a file for reading; it must be a regular one, without large holes.

    ``inside``: the folder that it must really lie in, wherever links lead. Raises DataError.
    """
    if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
        raise DataError(f"{path} is a link out of {inside}; copy the file, or remove the link")
    try:
        file = open_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    status = os.fstat(file.fileno())
    taken = 512 * getattr(status, "st_blocks", status.st_size)  # not on Windows
    if status.st_size > max(_INFLATED_BYTES, _MOST_HOLES * taken):
        file.close()
        raise DataError(f"{path} claims {status.st_size} bytes, of which most are holes")
    return file


def text_lines(path: Path, inside: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their ends; raises DataError."""
    file = io.BufferedReader(open_data(path, inside))
    # Only "\n" ends a line: texts contain characters that splitlines() takes for ends.
    with io.TextIOWrapper(file, "utf-8-sig", newline="\n") as text:
        try:
            while line := text.readline(_LONGEST_LINE):
                if len(line) == _LONGEST_LINE:
                    raise DataError(f"{path} has a line of {_LONGEST_LINE} characters or more")
                yield line.removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no UTF-8 text: {error}") from error


def read_npz(
    path: Path, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Return named arrays of an ``.npz``; raises DataError if one is missing, or lies."""
    try:
        with io.BufferedReader(open_data(path)) as file, zipfile.ZipFile(_few_members(file)) as zip:
            members = {each.filename.removesuffix(".npy"): each for each in zip.infolist()}
            missing = [key for key in required if key not in members]
            if missing:
                raise DataError(
                    f"{path}: expected {', '.join(required)}; missing {', '.join(missing)}; "
                    f"found {', '.join(members)[:200] or 'nothing'}"
                )
            wanted = {key: members[key] for key in (*required, *optional) if key in members}
            _refuse_bombs(path, wanted.values())
            return {key: _array(zip, member) for key, member in wanted.items()}
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(
            f"{path} is not a whole .npz file ({error}); it may be truncated: fetch it again"
        ) from error


def _few_members(file: io.BufferedReader) -> io.BufferedReader:
    """Return ``file``; raises ValueError if its end announces a crowd, before that is read."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LONGEST_ZIP_END))
    end = file.read()
    place = end.rfind(_ZIP_END)
    members = int.from_bytes(end[place + 10 : place + 12], "little")
    if place >= 0 and (members > _MOST_MEMBERS or (_ZIP64_END in end and size < 2**32)):
        raise ValueError(f"its end announces {members} members or more")
    return file


def _refuse_bombs(path: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    inflated = sum(member.file_size for member in members)
    if inflated > max(_INFLATED_BYTES, _MOST_INFLATION * path.stat().st_size):
        raise DataError(
            f"{path} would inflate to {inflated} bytes, over {_MOST_INFLATION} times its size; if "
            "that is meant, save it uncompressed"
        )


def _array(zip: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Return an array whose header agrees with the member's size; raises ValueError."""
    if member.compress_type not in _METHODS:
        raise ValueError(f"{member.filename} is compressed by method {member.compress_type}")
    with zip.open(member) as stream:
        shape, fortran, dtype = _header(stream)
        rest = member.file_size - stream.tell()
        if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{member.filename} holds {dtype} {list(shape)[:8]}")
        if math.prod(shape) * dtype.itemsize != rest:
            raise ValueError(f"{member.filename} claims {dtype} {list(shape)[:8]} in {rest} bytes")
        content = np.empty(rest, np.uint8)
        _fill(stream, content)
    return content.view(dtype).reshape(shape, order="F" if fortran else "C")


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of NumPy's format")


def _fill(stream: IO[bytes], content: NDArray[np.uint8]) -> None:
    """Fill ``content`` with all that ``stream`` holds; raises ValueError if that is not as much."""
    place = 0
    while block := stream.read(_BLOCK):
        if len(block) > len(content) - place:
            raise ValueError("it holds more than it claims")
        content[place : place + len(block)] = np.frombuffer(block, np.uint8)
        place += len(block)
    if place < len(content):
        raise ValueError("it was cut")
