"""Work in forked children, so that a crash is counted instead of ending what counts it."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_S = 60  # a child that takes longer hangs; waiting for a processor does not count
_END_S = 3600  # of a child whose parent is gone


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: what it returned (None if it did not), and its signal (0: none)."""

    value: Any
    signal: int
    words: str = ""

    @property
    def hung(self) -> bool:
        """True if it was ended because it took too long."""
        return self.signal == signal.SIGALRM

    @property
    def crashed(self) -> bool:
        """True if a signal that nobody sent ended it."""
        return self.signal not in (0, signal.SIGALRM)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one child: how much it tried, and after how much results were not plain's."""

    tried: int
    wrong: int


def count_outcome(total: dict[str, int], ended: Ended, tried: str, expected: int) -> None:
    """Add to ``crashes``, ``hangs``, ``wrong`` and what is ``tried``.

    ``expected``: how much a child was to try that said nothing.
    """
    total["crashes"] += ended.crashed
    total["hangs"] += ended.hung
    if ended.words:
        print(ended.words, file=sys.stderr)  # why: the counts do not say
    told = isinstance(ended.value, Outcome)
    total[tried] += ended.value.tried if told else expected
    total["wrong"] += ended.value.wrong if told else not (ended.crashed or ended.hung)


def in_child(work: Callable[[], Any], longest_s: int = LONGEST_S) -> Ended:
    """Run ``work`` in a fork of this process, and return how that ended.

    Everything that it does first, it does first in its process.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work_and_exit(work, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        _end_if_it_hangs(pid, pipe, longest_s)
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if not told:
        return Ended(None, ended_by, "it said nothing")
    value, words = pickle.loads(told)
    return Ended(value, ended_by, words)


def _end_if_it_hangs(pid: int, pipe: BinaryIO, longest_s: int) -> None:
    """Wait until a child says something or ends; signal one that ran, or slept, for too long."""
    start_s = time.monotonic()
    while not select.select([pipe], [], [], min(1, longest_s))[0]:
        if time.monotonic() - start_s - _waited_s(pid) > longest_s:
            os.kill(pid, signal.SIGALRM)
            return


def _waited_s(pid: int) -> float:
    """Return how long a process's threads were ready to run while others did; the longest of them.

    Source: the kernel's scheduler/sched-stats.rst, ``/proc/PID/schedstat``.
    """
    waited_ns = [0]
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it ended meanwhile
            waited_ns.append(int(task.read_text().split()[1]))
    return max(waited_ns) / 1e9


def _work_and_exit(work: Callable[[], Any], writing: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # What hangs says where, on standard error, before the signal ends it.
    faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
    signal.alarm(_END_S)
    gc.freeze()  # what the parent made is no child's to search, each time that DAF collects
    told: tuple[Any, str] = (None, "")
    try:
        told = work(), ""
    except BaseException:
        told = None, traceback.format_exc()
    finally:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(told))
        os._exit(0)
