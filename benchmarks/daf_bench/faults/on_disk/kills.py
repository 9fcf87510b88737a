"""Runs killed by SIGKILL at random moments: at most what a checkpoint's pace allows is lost.

A run in a fork is killed, resumed, killed again, and so on until it has come to its end, which must
be that of a run that was never killed, bit for bit.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daf.core.errors import DafError
from daf.files.checkpoint import read_whole
from daf.files.records import read_lines
from daf.training.run_folder import RunFolder
from daf.training.settings import TrainSettings
from daf_bench.faults.children import in_child
from daf_bench.faults.on_disk.tiny_runs import (
    Outcome,
    begin,
    completed,
    count_end,
    drawn_settings,
    resume,
)

_STEPS = 60
_COUNTED = (
    "lost_steps_beyond_checkpoint",
    "not_bit_equal",
    "lost",
    "tracebacks",
    "hangs",
    "crashes",
)


def run_kills(count: int, seed: int) -> dict[str, int]:
    """Kill runs ``count`` times; return ``kills_tried`` and what went wrong."""
    draw = random.Random(f"kills {seed}")
    counts: Counter[str] = Counter(dict.fromkeys(("kills_tried", *_COUNTED), 0))
    while counts["kills_tried"] < count:
        with tempfile.TemporaryDirectory(prefix="daf-faults-") as name:
            _one_run(draw, Path(name), count, counts)
    return dict(counts)


def _one_run(draw: random.Random, place: Path, count: int, counts: Counter[str]) -> None:
    every = draw.choice((1, 3, 7, 20))
    settings = drawn_settings(draw, _STEPS, f"{every}steps")
    start_s = time.monotonic()
    expected = completed(settings, place / "whole", _STEPS)
    whole_s = time.monotonic() - start_s
    folder = place / "killed"
    for _ in range(draw.randrange(3, 12)):
        if counts["kills_tried"] == count:
            break
        work = _next_try(settings, folder)
        if not _killed(work, draw.random() ** 0.5 * whole_s * _left(folder)):
            break  # it has come to its end
        counts["kills_tried"] += 1
        _count_lost(folder, every, counts)
    found = count_end(counts, in_child(_next_try(settings, folder)))
    if found is None:
        return
    counts["lost"] += bool(found.refused)
    counts["not_bit_equal"] += not found.refused and found.results != expected.results


def _next_try(settings: TrainSettings, folder: Path) -> Callable[[], Outcome]:
    if _has_begun(folder):
        return lambda: resume(folder, _STEPS)
    return lambda: begin(settings, folder)


def _has_begun(folder: Path) -> bool:
    """True if there is a checkpoint; a folder that was killed before it is emptied."""
    run = RunFolder(folder)
    if run.checkpoint.exists():
        return True
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return False


def _left(folder: Path) -> float:
    """Return what a try still has to do, as a share of a whole run: it begins, and goes on."""
    run = RunFolder(folder)
    kept = read_whole(run.checkpoint)[1]["run"]["step"] if run.checkpoint.exists() else 0
    return 0.1 + 0.9 * (1 - kept / _STEPS)


def _killed(work: Callable[[], Any], after_s: float) -> bool:
    """Run ``work`` in a fork and kill it after so long; False if it ended before."""
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()
            work()
        finally:
            os._exit(0)
    child = os.pidfd_open(pid)
    select.select([child], [], [], after_s)  # no longer than it runs
    os.close(child)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _count_lost(folder: Path, every: int, counts: Counter[str]) -> None:
    """Count steps that were logged and are not within a checkpoint's pace, and missing lines."""
    run = RunFolder(folder)
    if not run.checkpoint.exists():
        counts["lost_steps_beyond_checkpoint"] += (
            run.metrics.exists() and run.metrics.stat().st_size > 0
        )
        return
    steps = [line["step"] for line in read_lines(run.metrics)]
    try:
        kept = int(read_whole(run.checkpoint)[1]["run"]["step"])
    except DafError:
        counts["lost"] += 1
        return
    counts["lost_steps_beyond_checkpoint"] += max(steps, default=0) - kept > every
    counts["lost"] += steps[:kept] != list(range(1, kept + 1))
