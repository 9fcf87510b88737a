"""A run of a second, on which faults are tried: begun, resumed, compared and reported.

Everything is ``daf train``'s own code. What trains runs in a fork, so that a crash is counted.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from daf.core.errors import DafError
from daf.files.records import read_lines
from daf.memory.process_memory import resident_bytes
from daf.report.page import page
from daf.report.runs import read_runs
from daf.report.terminal import show_report
from daf.training.callbacks import Observer
from daf.training.loop import train
from daf.training.run_folder import RunFolder
from daf.training.settings import TrainSettings
from daf_bench.faults.children import Ended, in_child

_ROOM_BYTES = 800 * 10**6  # for a run under a budget
_COMPARED = ("steps", "loss", "metric", "evaluations", "finished", "rollbacks")


def tiny(classes: int, channels: int) -> nn.Module:
    """Return a model with what a checkpoint can hold: statistics, dropout, momentum."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(72, classes),
    )


def drawn_settings(draw: random.Random, steps: int, every: str) -> TrainSettings:
    """Return a run's settings; its kind is drawn."""
    return TrainSettings(
        f"{__name__}:tiny",
        image_size=8,
        batch_size=64,
        epochs=10,
        max_steps=steps,
        threads=1,
        seed=draw.randrange(100),
        optimizer=draw.choice(("sgd", "adamw")),
        bits=draw.choice((None, 2, "exact")),
        budget=resident_bytes() + _ROOM_BYTES if draw.random() < 0.2 else None,
        checkpoint_every=every,
    )


@dataclass
class Outcome:
    """What a run or a report said, and what it left; ``refused``: its error, if DAF's own."""

    refused: str = ""
    words: list[str] = field(default_factory=list)  # warnings and notes
    results: dict[str, Any] = field(default_factory=dict)  # that a repetition must repeat


class _Notes(Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def note(self, text: str) -> None:
        self.heard.append(text)


def begin(settings: TrainSettings, folder: Path) -> Outcome:
    """Begin a run and train it."""
    return _carried_out(folder, settings, resume=False)


def resume(folder: Path, steps: int) -> Outcome:
    """Go on with a run until ``steps``, as ``daf train --resume --max-steps`` does."""
    try:
        settings = RunFolder(folder).read_settings().resumed_with({"max_steps": steps})
    except DafError as error:
        return Outcome(str(error))
    return _carried_out(folder, settings, resume=True)


def _carried_out(folder: Path, settings: TrainSettings, *, resume: bool) -> Outcome:
    notes = _Notes()
    torch.set_num_threads(1)
    try:
        summary = train(settings, folder, notes, resume=resume)
    except DafError as error:
        return Outcome(str(error), notes.heard)
    results = {key: summary[key] for key in _COMPARED}
    results["weights"] = digest(folder / "model.safetensors")
    results["losses"] = [line["loss"] for line in read_lines(folder / "metrics.jsonl")]
    return Outcome("", summary["warnings"], results)


def report(folder: Path) -> Outcome:
    """Report on a run, as page and text, as ``daf report`` does."""
    try:
        runs = read_runs([folder])
    except DafError as error:
        return Outcome(str(error))
    text = io.StringIO()
    show_report(runs, Console(file=text, width=120, markup=False, emoji=False))
    results = {"page": page(runs), "text": text.getvalue(), "summary": dict(runs[0].summary)}
    return Outcome("", list(runs[0].problems), results)


def digest(path: Path) -> str:
    """Return a hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def completed(settings: TrainSettings, folder: Path, steps: int) -> Outcome:
    """Return the outcome of an uninterrupted run, made in a fork; raises RuntimeError."""
    ended = in_child(lambda: begin(replace(settings, max_steps=steps), folder))
    if ended.value is None or ended.value.refused:
        raise RuntimeError(f"the reference failed: {ended.words or ended.value}")
    found: Outcome = ended.value
    return found


def count_end(counts: Counter[str], ended: Ended) -> Outcome | None:
    """Count a crash, a hang or a traceback; return the outcome of a child that had none."""
    if ended.hung:
        counts["hangs"] += 1
    elif ended.crashed:
        counts["crashes"] += 1
    elif ended.value is None:
        counts["tracebacks"] += 1
    found: Outcome | None = ended.value
    return found
