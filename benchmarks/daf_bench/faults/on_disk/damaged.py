"""Damaged run folders: a clear error, the older state, or the same result; never a wrong one.

A run that ended after a part of its steps is copied, one of its files or several are damaged, and
the copy is reported on and resumed. What comes out is compared with the undamaged copy's.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from daf_bench.faults.children import in_child
from daf_bench.faults.on_disk.damage import drawn_damage
from daf_bench.faults.on_disk.tiny_runs import (
    Outcome,
    completed,
    count_end,
    drawn_settings,
    report,
    resume,
)

_STEPS, _ALL_STEPS = 25, 32  # of 22 an epoch
_COUNTED = ("not_bit_equal", "silent", "tracebacks", "hangs", "crashes")


def run_damaged(count: int, seed: int, notes: list[str] | None = None) -> dict[str, int]:
    """Damage ``count`` copies of a run; return ``damaged_tried`` and what went wrong.

    ``notes`` takes a sentence on each that did.
    """
    draw = random.Random(f"damaged {seed}")
    counts: Counter[str] = Counter(dict.fromkeys(("damaged_tried", *_COUNTED), 0))
    with tempfile.TemporaryDirectory(prefix="daf-faults-") as name:
        place = Path(name)
        settings = drawn_settings(draw, _STEPS, f"{draw.randrange(2, 9)}steps")
        completed(settings, place / "base", _STEPS)
        expected = _both(place / "base", place / "whole" / "run")
        for _ in range(count):
            before = counts.copy()
            done = _tried(draw, place, expected, counts)
            counts["damaged_tried"] += 1
            wrong = (
                {name: counts[name] - before[name] for name in _COUNTED}
                if notes is not None
                else {}
            )
            if any(wrong.values()) and notes is not None:
                notes.append(f"{done}: {[name for name, n in wrong.items() if n]}")
            shutil.rmtree(place / "copy")
    return dict(counts)


def _both(base: Path, copy: Path) -> tuple[Outcome, Outcome]:
    """Return what an undamaged copy reports and comes to."""
    shutil.copytree(base, copy)
    reported = in_child(lambda: report(copy)).value
    resumed = in_child(lambda: resume(copy, _ALL_STEPS)).value
    if reported is None or resumed is None or resumed.refused:
        raise RuntimeError(f"the reference failed: {resumed}")
    return reported, resumed


def _tried(
    draw: random.Random, place: Path, expected: tuple[Outcome, Outcome], counts: Counter[str]
) -> str:
    copy = place / "copy" / "run"
    shutil.copytree(place / "base", copy)
    done = drawn_damage(draw, copy)
    reported = count_end(counts, in_child(lambda: report(copy)))
    resumed = count_end(counts, in_child(lambda: resume(copy, _ALL_STEPS)))
    for found, right in zip((reported, resumed), expected, strict=True):
        if found is not None and not found.refused and not found.words:
            counts["silent"] += found.results != right.results
    if resumed is not None and not resumed.refused:
        counts["not_bit_equal"] += resumed.results["weights"] != expected[1].results["weights"]
    return done
