"""A run's memory over time, against its budget, floor and predicted peak.

``python -m daf.report.memory_picture RUN`` reads ``memory.jsonl`` and
``summary.json`` of a run's folder and writes ``memory.png`` there. The file
imports nothing of DAF, so that it can run where memory is short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INK = "#22303c"
_QUIET = "#8a97a3"
_MEMORY = "#2a78b8"
_BUDGET = "#c0392b"
_PREDICTED = "#d98c1f"
_SHADES = {"profile": "#f1ead9", "evaluate": "#e9eef3"}
_SHADE_NAMES = {"profile": "measuring", "evaluate": "testing"}
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """What ``memory.jsonl`` holds: samples (seconds, megabytes) and marks (seconds, label)."""

    seconds: Sequence[float]
    megabytes: Sequence[float]
    marks: Sequence[tuple[float, str]]


def read_memory(path: Path) -> Memory:
    """Read a memory log.

    Raises:
        ValueError: it holds no sample.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    samples = sorted(
        (line["seconds"], line["resident_bytes"] / _MB)
        for line in lines
        if "resident_bytes" in line
    )
    if not samples:
        raise ValueError(f"{path} holds no sample")
    marks = sorted((line["seconds"], line["mark"]) for line in lines if "mark" in line)
    return Memory([at for at, _ in samples], [size for _, size in samples], marks)


def title(summary: Mapping[str, Any]) -> str:
    """What the picture says, in a sentence."""
    what = f"{summary['model']} on {str(summary['data']).partition(':')[0]}"
    peak = summary["peak_bytes"] / _MB
    if summary["budget_bytes"] is None:
        return f"{what}, trained plainly, peaked at {peak:,.0f} MB"
    budget = summary["budget_bytes"] / _MB
    if peak <= budget:
        return f"{what} stayed {budget - peak:,.0f} MB below its budget of {budget:,.0f} MB"
    return f"{what} passed its budget of {budget:,.0f} MB by {peak - budget:,.0f} MB"


def draw(run: Path) -> Path:
    """Draw the picture of the run in the folder ``run``; return where it is.

    Raises:
        OSError: a file of the run is missing.
        ValueError: a file of the run is damaged.
    """
    import matplotlib  # heavy, and wanted in this process only

    matplotlib.use("Agg")
    from matplotlib import pyplot

    summary = json.loads((run / "summary.json").read_text())
    memory = read_memory(run / "memory.jsonl")
    figure, axes = pyplot.subplots(figsize=(9, 4.4), dpi=160, layout="constrained")
    _shade_phases(axes, memory)
    axes.fill_between(memory.seconds, memory.megabytes, color=_MEMORY, alpha=0.18, linewidth=0)
    axes.plot(memory.seconds, memory.megabytes, color=_MEMORY, linewidth=1.2)
    _draw_levels(axes, summary)
    _dress(axes, memory, summary)
    path = run / "memory.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _shade_phases(axes: Any, memory: Memory) -> None:
    ends = [at for at, _ in memory.marks[1:]] + [memory.seconds[-1]]
    named: set[str] = set()
    for (start, label), end in zip(memory.marks, ends, strict=True):
        if label in _SHADES:
            name = None if label in named else _SHADE_NAMES[label]
            axes.axvspan(start, end, color=_SHADES[label], linewidth=0, label=name)
            named.add(label)


def _draw_levels(axes: Any, summary: Mapping[str, Any]) -> None:
    levels = (
        ("budget_bytes", "budget", _BUDGET, "-", 1.8),
        ("predicted_peak_bytes", "predicted peak", _PREDICTED, "--", 1.4),
        ("peak_bytes", "measured peak", _MEMORY, ":", 1.6),
        ("floor_bytes", "floor: before the model exists", _QUIET, "-", 1.2),
    )
    for name, words, colour, style, width in levels:
        size = summary.get(name)
        if size is not None:
            label = f"{words}, {size / _MB:,.0f} MB"
            axes.axhline(size / _MB, color=colour, linestyle=style, linewidth=width, label=label)


def _dress(axes: Any, memory: Memory, summary: Mapping[str, Any]) -> None:
    axes.set_title(title(summary), loc="left", color=_INK, fontsize=12, fontweight="bold", pad=12)
    axes.set_xlabel("seconds", color=_INK)
    axes.set_ylabel("memory of the whole process (MB)", color=_INK)
    levels = [summary.get(name) or 0 for name in ("budget_bytes", "peak_bytes", "floor_bytes")]
    highest = max(max(levels) / _MB, *memory.megabytes)
    axes.set_ylim(0, 1.12 * highest)
    axes.set_xlim(memory.seconds[0], max(memory.seconds[-1], memory.seconds[0] + 0.1))
    axes.grid(axis="y", color="#dfe4e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelcolor=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_QUIET)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelcolor=_INK)


def _be_killed_first() -> None:
    """Where memory runs out, lose this process first: a picture is worth less than a run."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # not Linux


def main(arguments: Sequence[str]) -> int:
    """Draw for the run named on the command line; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m daf.report.memory_picture RUN", file=sys.stderr)
        return 2
    _be_killed_first()
    try:
        print(draw(Path(arguments[0])))
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot draw {arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
