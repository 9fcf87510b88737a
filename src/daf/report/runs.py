"""A run's records, read from its folder for reports, whole or not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from daf.core.errors import RunFolderError
from daf.files.folder_lock import holder_of
from daf.files.records import begins_with, extent_of, read_json, read_lines
from daf.report.scale import Point

Record = Mapping[str, Any]
Budgets = Sequence[tuple[float, float | None]]  # (seconds, MB; None: no budget from then on)
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """``memory.jsonl``; budgets if they changed."""

    points: Sequence[Point]  # samples: (seconds, MB)
    marks: Sequence[tuple[float, str]]  # (seconds, label)
    budgets: Budgets = ()

    @property
    def budget_moved(self) -> bool:
        """True if there was more than one budget."""
        return len({size for _, size in self.budgets}) > 1


@dataclass(frozen=True, slots=True)
class Run:
    """One run's records; ``problems`` are sentences on what is missing or damaged."""

    name: str
    summary: Record
    memory: Memory
    steps: Sequence[Record]
    plan: Record | None
    sites: Sequence[Record]
    problems: Sequence[str] = ()

    @property
    def title(self) -> str:
        """A sentence on how the run kept its budget."""
        summary = self.summary
        what = f"{summary['model']} on {str(summary['data']).partition(':')[0]}"
        if summary["peak_bytes"] is None:
            return f"{what}: no memory was measured"
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
        known = (record for record in self.steps if record.get(key) is not None)
        return [(float(record["step"]), float(record[key])) for record in known]

    @property
    def budget_bytes(self) -> int | None:
        """The last budget in force; None for a run without one."""
        return self.summary["budget_bytes"]  # type: ignore[no-any-return]

    @property
    def above_floor_bytes(self) -> int | None:
        """The measured peak less the floor; None if either is unknown."""
        return above_floor_bytes(self.summary)

    @property
    def prediction_error(self) -> float | None:
        """(predicted − measured peak) ÷ (measured peak − floor)."""
        predicted = self.summary["predicted_peak_bytes"]
        above = self.above_floor_bytes
        if not predicted or above is None or above <= 0:
            return None
        return float(predicted - self.summary["peak_bytes"]) / above

    @property
    def saved_ratio(self) -> float | None:
        """Plain PyTorch's saved bytes ÷ the bytes held instead."""
        held = self.summary["saved_bytes_peak"]
        return self.summary["saved_bytes_plain"] / held if held else None


def above_floor_bytes(summary: Record) -> int | None:
    """Return the measured peak less the floor; None if either is unknown."""
    peak, floor = summary["peak_bytes"], summary["floor_bytes"]
    return None if peak is None or floor is None else int(peak - floor)


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read what there is of a run, named as its folder by default; ``problems`` say what is not.

    Without a whole summary it is made from logs. Raises RunFolderError if the folder holds no run.
    """
    records = _Records(folder)
    steps, memory = records.lines("metrics.jsonl"), _memory_of(records.lines("memory.jsonl"))
    plan, sites = records.one("plan.json"), records.lines("sites.jsonl")
    if (summary := records.one("summary.json")) is None:
        settings = records.one("run.json")
        if settings is None and not steps:
            raise RunFolderError(
                f"asked to report on {folder}, which holds no run: neither summary.json nor "
                "run.json nor metrics.jsonl can be read; name the --out of a `daf train`"
            )
        if [record["step"] for record in steps] != list(range(1, len(steps) + 1)):
            records.problems.append("metrics.jsonl does not hold every step in order")
        summary = _summary_from_logs(settings or {}, steps, memory, plan or {})
    else:
        records.compare(summary, steps)
    if (holder := holder_of(folder)) is not None:
        records.problems.append(f"the run goes on: {holder} is training in its folder")
    problems = (*records.problems, *(summary.get("warnings") or ()))
    return Run(name or folder.resolve().name, summary, memory, steps, plan, sites, problems)


class _Records:
    """A folder's records; ``problems``: sentences on those that are missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.problems: list[str] = []
        self._folder = folder

    def one(self, name: str) -> Record | None:
        """Return an object; None if it is missing or damaged."""
        try:
            return read_json(self._folder / name)
        except FileNotFoundError:
            self.problems.append(f"{name} is missing")
        except (OSError, ValueError) as error:
            self.problems.append(f"{name} cannot be read: {error}")
        return None

    def compare(self, summary: Record, steps: Sequence[Record]) -> None:
        """Say where logs are not those that the summary is of."""
        if len(steps) != summary["steps"]:
            self.problems.append(
                f"metrics.jsonl holds {len(steps)} whole lines, and summary.json is of "
                f"{summary['steps']} steps"
            )
        for name, (nbytes, checksum) in summary.get("logs", {}).items():
            if not begins_with(self._folder / name, (nbytes, checksum)):
                self.problems.append(f"{name} has lost or changed lines from before the summary")
            elif extent_of(self._folder / name)[0] > nbytes:
                self.problems.append(f"{name} has lines from after the summary")

    def lines(self, name: str) -> list[Record]:
        """Return a log's whole lines."""
        damaged: list[int] = []
        found: list[Record] = []
        try:
            found = list(read_lines(self._folder / name, damaged))
        except RunFolderError as error:
            self.problems.append(str(error))
        if damaged:
            self.problems.append(f"{name}: {len(damaged)} damaged lines are left out")
        elif not found:
            self.problems.append(f"{name} is missing or empty")
        return found


_SUMMARISED = (
    *("model", "data", "batch_size", "seed", "threads", "optimizer", "device", "parameters"),
    *("budget_bytes", "floor_bytes", "peak_bytes", "predicted_peak_bytes", "saved_bytes_plain"),
    *("saved_bytes_peak", "step_ms_median", "examples_per_s", "loss", "metric", "metric_name"),
    *("policy", "micro_batch", "versions", "steps"),
)
_LOSS_WINDOW_STEPS = 50


def _summary_from_logs(
    settings: Record, steps: Sequence[Record], memory: Memory, plan: Record
) -> Record:
    """Return a summary's entries as far as logs tell them; others are None."""
    account = plan.get("account") or {}
    peaks = [record["peak_bytes"] for record in steps if "peak_bytes" in record]
    peaks += [round(size * _MB) for _, size in memory.points]
    last: Record = steps[-1] if steps else {}
    found = {
        "steps": last.get("step", 0),
        "budget_bytes": last.get("budget_bytes"),
        "floor_bytes": account.get("floor"),
        "peak_bytes": max(peaks, default=None),
        "predicted_peak_bytes": plan.get("predicted_peak_bytes"),
        "policy": plan.get("policy"),
        "micro_batch": plan.get("micro_batch"),
        "step_ms_median": _middle(steps, "step_ms"),
        "examples_per_s": _middle(steps, "examples_per_s"),
        "loss": fmean(each["loss"] for each in steps[-_LOSS_WINDOW_STEPS:]) if steps else None,
    }
    return {key: settings.get(key) for key in _SUMMARISED} | found


def _middle(steps: Sequence[Record], key: str) -> float | None:
    found = [record[key] for record in steps if key in record]
    return median(found) if found else None


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


def _memory_of(lines: Sequence[Record]) -> Memory:
    sampled = (line for line in lines if "resident_bytes" in line)
    samples = sorted((line["seconds"], line["resident_bytes"] / _MB) for line in sampled)
    marks = sorted((line["seconds"], line["mark"]) for line in lines if "mark" in line)
    asked = ((line["seconds"], line["budget_bytes"]) for line in lines if "budget_bytes" in line)
    budgets = [(max(0.0, at), None if size is None else size / _MB) for at, size in asked]
    return Memory(samples, marks, budgets)
