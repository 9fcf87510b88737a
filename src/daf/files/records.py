"""JSON objects that carry their own checksum, in files of one and in logs of many, one a line.

An object's checksum counts its file's name too, so that none stands in for another.
"""

import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from daf.core.errors import RunFolderError
from daf.files.atomic import NO_LINKS, open_regular, replacing, write_error

_CHECKSUM = "crc32"  # of the file's name and the object's JSON text without this key
_BLOCK = 1 << 16
Extent = tuple[int, int]  # bytes, and their checksum


def _sealed(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**value, _CHECKSUM: _checksum(value, name)}


def unsealed(text: bytes, name: str) -> dict[str, Any]:
    """Return the object that ``text`` of a file ``name`` holds; raises ValueError if damaged."""
    try:
        value = json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__} instead of an object")
    if (found := value.pop(_CHECKSUM, None)) is None:
        raise ValueError("it has no checksum: it is damaged, or another version's")
    if found != _checksum(value, name):
        raise ValueError("it does not have its checksum any more")
    return value


def _checksum(value: Mapping[str, Any], name: str) -> str:
    return f"{zlib.crc32(f'{name} {json.dumps(value)}'.encode()):08x}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one object, atomically."""
    with replacing(path) as file:
        file.write((json.dumps(_sealed(value, path.name), indent=2) + "\n").encode())


def read_json(path: Path, name: str | None = None) -> dict[str, Any]:
    """Return one object; raises OSError or ValueError if it is missing or damaged.

    ``name``: of the file when it was written, by default its present one.
    """
    with open_regular(path) as file:
        return unsealed(file.read(), name or path.name)


def write_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Write objects, one a line, atomically."""
    with replacing(path) as file:
        file.write(_lines(objects, path.name))


def _lines(objects: Iterable[Mapping[str, Any]], name: str) -> bytes:
    return b"".join(json.dumps(_sealed(each, name)).encode() + b"\n" for each in objects)


def read_lines(path: Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a log's objects; none without a file. Lines that cannot be read are left out.

    Their numbers, counted from 1, go to ``damaged``; a last line that was cut is one of them.
    Raises RunFolderError if the file cannot be read.
    """
    if not path.exists():
        return
    try:
        with io.BufferedReader(open_regular(path)) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield unsealed(line, path.name)
                except ValueError:
                    if damaged is not None:
                        damaged.append(number)
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from error


def cut_log(path: Path, nbytes: int) -> None:
    """Cut a log, if there is one, to the whole lines within its first ``nbytes``.

    Needs no room on the disk. Raises RunFolderError if the file cannot be written.
    """
    if not path.exists():
        return
    try:
        with open_regular(path, os.O_RDWR | NO_LINKS) as file:
            file.truncate(_end_of_lines(file, min(os.fstat(file.fileno()).st_size, nbytes)))
    except OSError as error:
        raise write_error(path, error) from error


def begins_with(path: Path, extent: Extent) -> bool:
    """True if a log still begins with what it held at ``extent``."""
    return extent_of(path, extent[0]) == extent


def extent_of(path: Path, most_bytes: int = sys.maxsize) -> Extent:
    """Return the extent of a log, or of its first ``most_bytes``; (0, 0) if it cannot be read."""
    try:
        with open_regular(path) as file:
            return _checksum_of(file, most_bytes)
    except OSError:
        return 0, 0


def _checksum_of(file: io.FileIO, most_bytes: int) -> Extent:
    """Return the extent of an open file, which is read up to there."""
    nbytes = checksum = 0
    while block := file.read(min(_BLOCK, most_bytes - nbytes)):
        nbytes, checksum = nbytes + len(block), zlib.crc32(block, checksum)
    return nbytes, checksum


def end_of(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> int:
    """Return the bytes of a log up to its last line that ``is_kept``."""
    end = place = 0
    with io.BufferedReader(open_regular(path)) as lines:
        for line in lines:
            place += len(line)
            with suppress(ValueError):
                end = place if is_kept(unsealed(line, path.name)) else end
    return end


def _end_of_lines(file: io.FileIO, end: int) -> int:
    """Return where the last line that ends at or before ``end`` ends."""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        last = file.read(end - start).rfind(b"\n")
        if last >= 0:
            return start + last + 1
        end = start
    return 0


class GrowingFile:
    """A log whose lines reach the system before ``append`` returns; raises RunFolderError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_LINKS)
            self._size, self._checksum = _checksum_of(self._file, sys.maxsize)
        except OSError as error:
            raise write_error(path, error) from error

    def append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Append objects, one a line, all or none; raises RunFolderError if the disk is full."""
        data = _lines(objects, self._path.name)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self._size)
            raise RunFolderError(
                f"cannot write {self._path}: {error.strerror or error}; its lines so far and the "
                "last checkpoint are kept; free some space, then --resume"
            ) from error
        self._size += len(data)
        self._checksum = zlib.crc32(data, self._checksum)

    def sync(self) -> Extent:
        """Return the log's extent, once it is on disk."""
        os.fsync(self._file.fileno())
        return self._size, self._checksum

    def close(self) -> None:
        """Close the file."""
        self._file.close()
