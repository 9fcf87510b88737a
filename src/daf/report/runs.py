"""A finished run's records, read from its folder for reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daf.core.errors import RunFolderError
from daf.report.memory_picture import Memory, read_memory

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: ``summary.json``, the memory log, one record a step, and the plan's records.

    ``plan`` is None and ``sites`` empty for a run that an older version wrote.
    """

    name: str
    summary: Record
    memory: Memory
    steps: Sequence[Record]
    plan: Record | None
    sites: Sequence[Record]

    @property
    def budget_bytes(self) -> int | None:
        """The last budget in force; None for a run trained plainly."""
        return self.summary["budget_bytes"]  # type: ignore[no-any-return]

    @property
    def above_floor_bytes(self) -> int:
        """The measured peak less the floor."""
        return int(self.summary["peak_bytes"] - self.summary["floor_bytes"])

    @property
    def prediction_error(self) -> float | None:
        """(predicted − measured peak) ÷ (measured peak − floor), as the design divides it."""
        predicted = self.summary["predicted_peak_bytes"]
        if not predicted or self.above_floor_bytes <= 0:
            return None
        return float(predicted - self.summary["peak_bytes"]) / self.above_floor_bytes

    @property
    def saved_ratio(self) -> float | None:
        """What plain PyTorch would save for backward ÷ what was held for it."""
        held = self.summary["saved_bytes_peak"]
        return self.summary["saved_bytes_plain"] / held if held else None


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read the run in ``folder``; by default it is called as its folder is.

    Raises:
        RunFolderError: it holds no run, an unfinished one, or damaged records.
    """
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
            _records(folder / "metrics.jsonl"),
            _plan(folder / "plan.json"),
            _records(folder / "sites.jsonl"),
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"cannot read the run in {folder}: {error}") from error


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several runs; those in folders of the same name are told apart by their paths.

    Raises:
        RunFolderError: one of them cannot be read, or one was named twice.
    """
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise RunFolderError("asked to report on one run twice; name each run once")
    names = [path.name for path in resolved]
    return [
        read_run(folder, str(folder) if names.count(path.name) > 1 else None)
        for folder, path in zip(folders, resolved, strict=True)
    ]


def _records(path: Path) -> list[Record]:
    """The JSON lines of a file; a last one that a crash cut short is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _plan(path: Path) -> Record | None:
    return json.loads(path.read_text()) if path.exists() else None
