"""A finished run's records, read from its folder for reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daf.core.errors import RunFolderError
from daf.files.atomic import read_lines
from daf.report.scale import Point

Record = Mapping[str, Any]
Budgets = Sequence[tuple[float, float | None]]  # (seconds, MB; None: no budget from then on)
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """``memory.jsonl``: samples in MB, marks as (seconds, label), and budgets if they changed."""

    seconds: Sequence[float]
    megabytes: Sequence[float]
    marks: Sequence[tuple[float, str]]
    budgets: Budgets = ()

    @property
    def points(self) -> list[Point]:
        """Samples as (seconds, MB)."""
        return list(zip(self.seconds, self.megabytes, strict=True))

    @property
    def budget_moved(self) -> bool:
        """True if there was more than one budget."""
        return len({size for _, size in self.budgets}) > 1


@dataclass(frozen=True, slots=True)
class Run:
    """One run's records; ``plan`` is None and ``sites`` empty if an older version made it."""

    name: str
    summary: Record
    memory: Memory
    steps: Sequence[Record]
    plan: Record | None
    sites: Sequence[Record]

    @property
    def title(self) -> str:
        """A sentence on how the run kept its budget."""
        summary = self.summary
        what = f"{summary['model']} on {str(summary['data']).partition(':')[0]}"
        peak = summary["peak_bytes"] / _MB
        sizes = sorted(size for _, size in self.memory.budgets if size is not None)
        if self.memory.budget_moved and sizes:
            return f"{what} followed a budget between {sizes[0]:,.0f} and {sizes[-1]:,.0f} MB"
        if self.budget_bytes is None:
            return f"{what}, trained plainly, peaked at {peak:,.0f} MB"
        budget = self.budget_bytes / _MB
        if peak <= budget:
            return f"{what} stayed {budget - peak:,.0f} MB below its budget of {budget:,.0f} MB"
        return f"{what} passed its budget of {budget:,.0f} MB by {peak - budget:,.0f} MB"

    @property
    def whose_memory(self) -> str:
        """What the peak measures: the process, or PyTorch's reservation on a device."""
        device = self.summary.get("device", "cpu")
        return "the whole process" if device == "cpu" else f"PyTorch on {device}"

    def points_of(self, key: str) -> list[Point]:
        """Return (step, value) of every step whose record has ``key``."""
        return [
            (float(record["step"]), float(record[key]))
            for record in self.steps
            if record.get(key) is not None
        ]

    @property
    def budget_bytes(self) -> int | None:
        """The last budget in force; None for a run without one."""
        return self.summary["budget_bytes"]  # type: ignore[no-any-return]

    @property
    def above_floor_bytes(self) -> int:
        """The measured peak less the floor."""
        return int(self.summary["peak_bytes"] - self.summary["floor_bytes"])

    @property
    def prediction_error(self) -> float | None:
        """(predicted − measured peak) ÷ (measured peak − floor)."""
        predicted = self.summary["predicted_peak_bytes"]
        if not predicted or self.above_floor_bytes <= 0:
            return None
        return float(predicted - self.summary["peak_bytes"]) / self.above_floor_bytes

    @property
    def saved_ratio(self) -> float | None:
        """Plain PyTorch's saved bytes ÷ the bytes held instead."""
        held = self.summary["saved_bytes_peak"]
        return self.summary["saved_bytes_plain"] / held if held else None


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read a run, named as its folder by default; raises RunFolderError if it is not whole."""
    if not (folder / "summary.json").exists():
        raise RunFolderError(
            f"asked to report on {folder}, which holds no summary.json; name the --out of a "
            "`daf train` that finished or was interrupted (`daf train --resume` goes on with one "
            "that was killed)"
        )
    try:
        return Run(
            name or folder.resolve().name,
            json.loads((folder / "summary.json").read_text()),
            read_memory(folder / "memory.jsonl"),
            list(read_lines(folder / "metrics.jsonl")),
            _plan(folder / "plan.json"),
            list(read_lines(folder / "sites.jsonl")),
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"cannot read the run in {folder}: {error}") from error


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs; equal names become paths. Raises RunFolderError for a folder named twice."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise RunFolderError("asked to report on one run twice; name each run once")
    names = [path.name for path in resolved]
    return [
        read_run(folder, str(folder) if names.count(path.name) > 1 else None)
        for folder, path in zip(folders, resolved, strict=True)
    ]


def read_memory(path: Path) -> Memory:
    """Read a memory log; raises ValueError if it holds no sample."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    samples = sorted(
        (line["seconds"], line["resident_bytes"] / _MB)
        for line in lines
        if "resident_bytes" in line
    )
    if not samples:
        raise ValueError(f"{path} holds no sample")
    marks = sorted((line["seconds"], line["mark"]) for line in lines if "mark" in line)
    budgets = [
        (max(0.0, line["seconds"]), None if size is None else size / _MB)
        for line in lines
        for size in [line.get("budget_bytes")]
        if "budget_bytes" in line
    ]
    return Memory([at for at, _ in samples], [size for _, size in samples], marks, budgets)


def _plan(path: Path) -> Record | None:
    return json.loads(path.read_text()) if path.exists() else None
