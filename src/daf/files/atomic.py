"""Files that are replaced atomically, and files of lines that only grow."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from daf.core.errors import RunFolderError

_TEMPORARY_SUFFIX = ".part"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replace ``path`` once safely on disk; raises RunFolderError, and keeps it, if that fails."""
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_error(path: Path, error: OSError) -> RunFolderError:
    """Return the error of an unwritable ``path``: why, what is kept, what to try."""
    kept = f"{path} is still the version from before" if path.exists() else f"{path} was not made"
    if error.errno == errno.ENOSPC:
        return RunFolderError(f"the disk is full: cannot write {path}; {kept}; free some space")
    return RunFolderError(f"cannot write {path}: {error.strerror or error}; {kept}")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, atomically."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def write_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON objects, one a line, atomically."""
    with replacing(path) as file:
        file.write("".join(json.dumps(each) + "\n" for each in objects).encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines up to a truncated one; none without the file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


class GrowingFile:
    """A file of lines that reach the system before ``append`` returns; raises RunFolderError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise write_error(path, error) from error

    def append(self, lines: str) -> None:
        """Append whole lines; raises RunFolderError if the disk is full (earlier lines stay)."""
        rest = memoryview(lines.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self._path}: {error.strerror or error}; its lines so far and the "
                "last checkpoint are kept; free some space, then --resume"
            ) from error

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
