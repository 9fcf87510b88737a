"""A folder that one process holds at a time, by ``flock`` on a file in it."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from daf.core.errors import RunFolderError
from daf.files.atomic import NO_LINKS, NO_WAITING

LOCK_NAME = "lock"
_LONGEST_NOTE = 200  # bytes


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Hold ``folder`` inside; raises RunFolderError if another process does, with name and pid.

    The lock's file is removed at the end; a killed process leaves a file that holds nobody up.
    Where the file system has no locks, nobody is refused.
    """
    path = folder / LOCK_NAME
    file = _locked(path)
    try:
        with suppress(OSError):  # a full disk
            os.truncate(file, 0)
            program = Path(sys.argv[0])
            name = program.parent.name if program.name == "__main__.py" else program.name
            os.pwrite(file, f"{name} (process {os.getpid()})".encode(), 0)
        yield
    finally:
        with suppress(OSError):  # the folder may be gone
            if _is_at(file, path):
                path.unlink()
        os.close(file)


def holder_of(folder: Path) -> str | None:
    """Return name and pid of the process that holds ``folder``; None if none does."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | NO_LINKS | NO_WAITING)
    except OSError:
        return None
    try:
        return None if _lock(file, shared=True) else _note(file)
    finally:
        os.close(file)


def _locked(path: Path) -> int:
    """Return the locked file; one that was removed while it was waited for is no lock."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | NO_LINKS | NO_WAITING
        try:
            file = os.open(path, flags, 0o600)
        except OSError as error:
            raise RunFolderError(f"cannot lock {path.parent}: {error.strerror}") from error
        if not _lock(file):
            holder = _note(file)
            os.close(file)
            raise RunFolderError(
                f"asked to write in {path.parent}, which {holder} is training in; wait for it, "
                "stop it, or name another --out"
            )
        if _is_at(file, path):
            return file
        os.close(file)


def _lock(file: int, *, shared: bool = False) -> bool:
    try:
        import fcntl  # not on Windows
    except ImportError:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _note(file: int) -> str:
    return os.pread(file, _LONGEST_NOTE, 0).decode(errors="replace") or "another process"


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
