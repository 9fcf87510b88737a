"""A memory cgroup with a hard limit, for showing that a job fits where another is killed.

Works with cgroup v1 and v2 where this process may create groups (usually as
root); ``can_limit`` says so in words when it may not.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daf._native import allocator

from daf.core.errors import PlatformError

_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V2_ROOT = Path("/sys/fs/cgroup")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
KILLED_BY_SYSTEM = -9


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A cgroup whose members may hold ``limit_bytes`` together."""

    path: Path
    limit_bytes: int
    peak_file: str

    def run(self, command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command inside the group; returncode -9 means that the system killed it."""
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            command, preexec_fn=self.enter, capture_output=True, text=True, check=False, **options
        )

    def enter(self) -> None:
        """Move this process into the group: what ``subprocess`` calls before a command."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_bytes(self) -> int | None:
        """The most the group held, page cache included (None where the kernel does not say)."""
        try:
            return int((self.path / self.peak_file).read_text())
        except OSError:
            return None


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))


def _make(limit_bytes: int) -> LimitedGroup:
    version_1 = (_V1_ROOT / "memory.limit_in_bytes").exists()
    path = (_V1_ROOT if version_1 else _V2_ROOT) / f"daf-{os.getpid()}-{limit_bytes}"
    path.mkdir()
    try:
        if version_1:
            _write(path / "memory.limit_in_bytes", limit_bytes)
            _forbid_swap(path / "memory.memsw.limit_in_bytes", limit_bytes)
            return LimitedGroup(path, limit_bytes, "memory.max_usage_in_bytes")
        _write(path / "memory.max", limit_bytes)
        _forbid_swap(path / "memory.swap.max", 0)
        return LimitedGroup(path, limit_bytes, "memory.peak")
    except OSError:
        path.rmdir()
        raise


def _forbid_swap(path: Path, value: int) -> None:
    # Kernels without swap accounting have no such file, and then nothing to forbid.
    if path.exists():
        _write(path, value)


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[LimitedGroup]:
    """A group with this limit (bytes), removed on exit.

    Raises:
        PlatformError: this process may not create memory cgroups here.
    """
    try:
        group = _make(limit_bytes)
    except OSError as error:
        raise PlatformError(
            f"asked for a memory cgroup of {limit_bytes} bytes; the system answered: {error}; "
            "run as root on Linux with the memory controller enabled"
        ) from error
    try:
        yield group
    finally:
        group.path.rmdir()


def drop_page_cache() -> bool:
    """Let the system forget the files that it has read, where it may be told to.

    This process gives back its libraries first, or a group's process would share them unbounded.
    """
    allocator.drop_library_pages()
    try:
        os.sync()
        _write(_DROP_CACHES, 3)
    except OSError:
        return False
    return True


def can_limit() -> tuple[bool, str]:
    """Whether ``limited_group`` works here, and the system's answer where it does not."""
    try:
        with limited_group(2**30):
            return True, "memory cgroups can be created"
    except PlatformError as error:
        return False, str(error)
