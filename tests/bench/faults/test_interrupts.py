"""An interrupt at any line leaves nothing behind: neither an exception nor the frames it holds."""

from __future__ import annotations

import gc
import weakref

from daf_bench.faults.interrupts import InterruptedAt

from daf.budget.governor import Governor


class Witness:
    """Lives as long as the frame that is interrupted."""


def interrupted(governor: Governor, line: int) -> tuple[weakref.ref[Witness], bool]:
    """Read the limits; some of their files are missing, which is an exception that is caught."""
    witness = Witness()
    try:
        with InterruptedAt(line):
            governor.refresh()
    except KeyboardInterrupt:
        return weakref.ref(witness), True
    return weakref.ref(witness), False


def test_no_frame_outlives_an_interrupt_at_any_line() -> None:
    governor = Governor(10**9)
    line, kept, has_come = 0, list[int](), True
    while has_come:
        line += 1
        left, has_come = interrupted(governor, line)
        if left() is not None:
            gc.collect()
        if left() is not None:
            kept.append(line)
    assert line > 100
    assert kept == []
