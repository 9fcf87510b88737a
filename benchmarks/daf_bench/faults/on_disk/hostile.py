"""Data that lie: refused by a ``DataError`` with the file's name, in bounded memory and time.

A kind of lie, its place and its size are drawn; the data are then loaded as ``daf train`` does, in
a fork whose memory is measured. Some of what is drawn harms nothing: it may load.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from daf.core.errors import DafError, DataError
from daf.memory.process_memory import peak_bytes, reset_peak, resident_bytes
from daf.training.data import load_data
from daf_bench.faults.children import in_child
from daf_bench.faults.on_disk import hostile_archives, hostile_images, hostile_texts
from daf_bench.faults.on_disk.lies import Lie

_MOST_BYTES = 200 * 10**6
_COUNTED = ("silent", "tracebacks", "hangs", "over_memory", "crashes")
LIES: tuple[Lie, ...] = (*hostile_archives.LIES, *hostile_images.LIES, *hostile_texts.LIES)


@dataclass(frozen=True, slots=True)
class _Loaded:
    error: Exception | None
    grown_bytes: int


def run_hostile(count: int, seed: int, notes: list[str] | None = None) -> dict[str, int]:
    """Load ``count`` hostile data sets; return ``hostile_tried`` and what went wrong.

    ``notes`` takes a sentence on each that did.
    """
    draw = random.Random(f"hostile {seed}")
    counts: Counter[str] = Counter(dict.fromkeys(("hostile_tried", *_COUNTED), 0))
    for trial in range(count):
        with tempfile.TemporaryDirectory(prefix="daf-faults-") as name:
            lie = draw.choice(LIES)
            data = lie.make(draw, Path(name))
            wrong = _tried(data, lie)
            counts["hostile_tried"] += 1
            counts.update(wrong)
            if wrong and notes is not None:
                notes.append(f"trial {trial}, {lie.make.__name__}: {', '.join(wrong)}")
    return dict(counts)


def _tried(data: str, lie: Lie) -> list[str]:
    """Return what went wrong in loading ``data``."""
    ended = in_child(lambda: _load(data))
    if ended.hung:
        return ["hangs"]
    if ended.crashed:
        return ["crashes"]
    if ended.value is None:
        return ["tracebacks"]
    loaded: _Loaded = ended.value
    wrong = ["over_memory"] if loaded.grown_bytes > _MOST_BYTES else []
    place = data.partition(":")[2]
    if loaded.error is None:
        return wrong + ["silent"] * lie.must_be_refused
    if not isinstance(loaded.error, DafError):
        return [*wrong, "tracebacks"]
    is_named = isinstance(loaded.error, DataError) and Path(place).name in str(loaded.error)
    return wrong if is_named else [*wrong, "silent"]


def _load(data: str) -> _Loaded:
    start_bytes = resident_bytes()
    reset_peak()
    error: Exception | None = None
    try:
        load_data(data, image_size=16 if data.startswith("images") else None)
    except DafError as found:
        error = type(found)(str(found))
    return _Loaded(error, peak_bytes() - start_bytes)
