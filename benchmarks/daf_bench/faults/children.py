"""Work in forked children, so that a crash is counted instead of ending what counts it."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST_S = 60  # a child that takes longer hangs


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
        _work_and_exit(work, writing, longest_s)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if not told:
        return Ended(None, ended_by, "it said nothing")
    value, words = pickle.loads(told)
    return Ended(value, ended_by, words)


def _work_and_exit(work: Callable[[], Any], writing: int, longest_s: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # What hangs says where, on standard error, before the signal ends it.
    faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
    signal.alarm(longest_s)
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
