"""Disks that fill up in the midst of a run: what was whole stays whole, and the run goes on after.

A run's folder is copied to a file system that has room for a part of what its next steps write: a
small tmpfs of our own, filled up to a drawn rest, where this process may mount one; so that every
write, rename and sync meets the kernel's own ENOSPC. Every third trial, and all where nothing can
be mounted, limit the size of each file instead (RLIMIT_FSIZE; the kernel's EFBIG). When the run has
failed, the disk gets room again, and the run must come to an uninterrupted one's end.
"""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from daf.core.errors import DafError
from daf.files.checkpoint import read_whole
from daf.training.run_folder import RunFolder
from daf_bench.faults.children import in_child
from daf_bench.faults.on_disk.tiny_runs import Outcome, completed, count_end, drawn_settings, resume

_STEPS, _ALL_STEPS = 10, 30
_DISK_BYTES = 4 << 20
_COUNTED = ("lost", "not_bit_equal", "tracebacks", "hangs", "crashes")


def run_full_disk(count: int, seed: int) -> dict[str, int]:
    """Let ``count`` runs meet a full disk; return ``full_disk_tried`` and what went wrong."""
    draw = random.Random(f"full disk {seed}")
    counts: Counter[str] = Counter(dict.fromkeys(("full_disk_tried", *_COUNTED), 0))
    with tempfile.TemporaryDirectory(prefix="daf-faults-") as name, _small_disk() as disk:
        place = Path(name)
        settings = drawn_settings(draw, _STEPS, f"{draw.randrange(1, 6)}steps")
        completed(settings, place / "base", _STEPS)
        shutil.copytree(place / "base", place / "whole")
        expected: Outcome = in_child(lambda: resume(place / "whole", _ALL_STEPS)).value
        written = sum(path.stat().st_size for path in (place / "whole").rglob("*.*"))
        for trial in range(count):
            on_disk = disk is not None and trial % 3 != 2
            copy = (disk if disk is not None and on_disk else place) / "run"
            shutil.copytree(place / "base", copy)
            rest = draw.randrange(int(1.2 * written))
            full = _filled(copy.parent, rest) if on_disk else _limited(rest // 4)
            _one_trial(copy, place / "base", full, expected, counts)
            shutil.rmtree(copy)
    return dict(counts)


def _one_trial(
    copy: Path,
    base: Path,
    full: AbstractContextManager[None],
    expected: Outcome,
    counts: Counter[str],
) -> None:
    def on_a_full_disk() -> Outcome:
        with full:
            return resume(copy, _ALL_STEPS)

    found = count_end(counts, in_child(on_a_full_disk))
    counts["full_disk_tried"] += 1
    counts["lost"] += not _is_kept(copy, base)
    if found is not None and not found.refused:
        counts["not_bit_equal"] += found.results != expected.results
    after = count_end(counts, in_child(lambda: resume(copy, _ALL_STEPS)))
    if after is not None:
        counts["lost"] += bool(after.refused) or any(
            "lost or changed" in each for each in after.words
        )
        counts["not_bit_equal"] += not after.refused and after.results != expected.results


def _is_kept(copy: Path, base: Path) -> bool:
    """True if a whole checkpoint is there, not older than the base's, and all its log lines."""
    try:
        before, now = (read_whole(RunFolder(each).checkpoint)[1]["run"] for each in (base, copy))
    except DafError:
        return False
    for name, (nbytes, _) in before["logs"].items():
        content = (copy / name).read_bytes()
        if content[:nbytes] != (base / name).read_bytes()[:nbytes] or content[-1:] != b"\n":
            return False
    return bool(now["step"] >= before["step"])


@contextmanager
def _small_disk() -> Iterator[Path | None]:
    """Yield a file system of our own; None where none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="daf-disk-") as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", name]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            mounted = False
        try:
            yield Path(name) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", name], check=True)


@contextmanager
def _filled(disk: Path, rest_bytes: int) -> Iterator[None]:
    """Leave so much of the disk free inside."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - rest_bytes)))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def _limited(most_bytes: int) -> Iterator[None]:
    """Let this process write no file beyond so many bytes inside."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
