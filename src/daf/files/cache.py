"""What DAF keeps between runs, in a folder of the user's caches: bounded, checked, never needed."""

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from daf.core.errors import RunFolderError
from daf.files.records import read_lines, write_lines

CACHE_VARIABLE = "DAF_CACHE"  # names the folder; empty: nothing is kept
MOST_BYTES, MOST_FILES = 64 * 2**20, 64  # of one kind


def cache_folder(kind: str = "") -> Path | None:
    """Return the folder, made if need be; None: nothing is kept, or it cannot be written."""
    asked = os.environ.get(CACHE_VARIABLE)
    if asked == "":
        return None
    try:
        folder = (Path(asked) if asked else _users_caches() / "daf") / kind
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home
        return None
    return folder if os.access(folder, os.W_OK) else None


def _users_caches() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def kept(folder: Path, name: str) -> dict[str, Any] | None:
    """Return what ``keep`` was last given by this name; None: nothing, or it is damaged."""
    path, damaged = folder / f"{name}.json", list[int]()
    with suppress(RunFolderError):
        for found in read_lines(path, damaged):
            with suppress(OSError):
                os.utime(path)  # the least recently used go first
            return found
    if damaged:
        logging.getLogger("daf").warning("%s is damaged; what it held is measured anew", path)
        drop(folder, name)
    return None


def drop(folder: Path, name: str) -> None:
    """Forget what was kept by a name."""
    with suppress(OSError):
        (folder / f"{name}.json").unlink()


def keep(folder: Path, name: str, value: Mapping[str, Any]) -> None:
    """Keep a value (JSON-able) by a name, and drop what was not used for longest beyond bounds."""
    try:
        write_lines(folder / f"{name}.json", [value])
        held = 0
        for number, (_, nbytes, path) in enumerate(sorted(_files(folder), reverse=True)):
            held += nbytes
            if number and (number >= MOST_FILES or held > MOST_BYTES):
                path.unlink(missing_ok=True)
    except (RunFolderError, OSError, TypeError, ValueError) as problem:  # a full disk stops no run
        logging.getLogger("daf").warning("%s is not kept: %s", name, problem)


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    found = []
    for path in folder.glob("*.json"):
        with suppress(OSError):  # another process removed it
            stat = path.stat()
            found.append((stat.st_mtime_ns, stat.st_size, path))
    return found
