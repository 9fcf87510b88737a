"""Files that are replaced atomically, and folders that one process holds.

No write follows a link, and temporary names cannot be guessed: others may write in a run's folder.
"""

import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from daf.core.errors import RunFolderError

PRIVATE = 0o600  # the mode of files that hold weights or data
NO_LINKS, NO_WAITING = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)  # not on Windows
_SHARED = 0o666  # less the user's mask
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.part")


@contextmanager
def replacing(path: Path, *, mode: int = _SHARED, kept: Path | None = None) -> Iterator[BinaryIO]:
    """Replace ``path`` once safely on disk; raises RunFolderError, and keeps it, if that fails.

    ``mode``: permissions of a new file. ``kept``: where the file from before stays, if there is
    one; at every moment one of both is whole.
    """
    temporary = _unused(path)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(temporary, flags, mode), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if kept is not None and path.exists():
            _keep(path, kept)
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise error if isinstance(error, RunFolderError) else write_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _unused(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def _keep(path: Path, kept: Path) -> None:
    """Let ``kept`` name the file that ``path`` names."""
    link = _unused(kept)
    try:
        os.link(path, link, follow_symlinks=False)
    except OSError:  # a file system without hard links
        path.replace(kept)
        return
    link.replace(kept)
    link.unlink(missing_ok=True)  # a rename between two names of one file leaves both


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed process left of ``replacing`` in a folder that this process holds."""
    for path in folder.glob(".*.part"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> io.FileIO:
    """Open a file without buffers; raises OSError for a device, a pipe or a folder, at once."""
    # Without NO_WAITING opening a pipe would wait for its writer.
    file = os.open(path, flags | NO_WAITING | getattr(os, "O_BINARY", 0), _SHARED)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return io.FileIO(file, "r+" if flags & (os.O_WRONLY | os.O_RDWR) else "r")


def write_error(path: Path, error: OSError) -> RunFolderError:
    """Return the error of an unwritable ``path``: why, what is kept, what to try."""
    kept = f"{path} is still the version from before" if path.exists() else f"{path} was not made"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunFolderError(f"the disk is full: cannot write {path}; {kept}; free some space")
    return RunFolderError(f"cannot write {path}: {error.strerror or error}; {kept}")
