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
_NAMED_FROM = 0.09  # of the picture's width
_LABEL_HEIGHT = 0.055  # of the picture's height
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """What ``memory.jsonl`` holds.

    Samples and budgets are (seconds, megabytes), marks (seconds, label); a
    budget of None is no budget from then on.
    """

    seconds: Sequence[float]
    megabytes: Sequence[float]
    marks: Sequence[tuple[float, str]]
    budgets: Sequence[tuple[float, float | None]] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line and its name."""

    megabytes: float
    words: str
    colour: str
    style: str
    width: float


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
    budgets = [
        (max(0.0, line["seconds"]), None if line["budget_bytes"] is None else _mb(line))
        for line in lines
        if "budget_bytes" in line
    ]
    return Memory([at for at, _ in samples], [size for _, size in samples], marks, budgets)


def _mb(line: Mapping[str, Any]) -> float:
    return float(line["budget_bytes"] / _MB)


def title(summary: Mapping[str, Any], budgets: Sequence[tuple[float, float | None]] = ()) -> str:
    """What the picture says, in a sentence; ``budgets`` as in :class:`Memory`."""
    what = f"{summary['model']} on {str(summary['data']).partition(':')[0]}"
    peak = summary["peak_bytes"] / _MB
    sizes = sorted(size for _, size in budgets if size is not None)
    if has_moved(budgets) and sizes:
        return f"{what} followed a budget between {sizes[0]:,.0f} and {sizes[-1]:,.0f} MB"
    if summary["budget_bytes"] is None:
        return f"{what}, trained plainly, peaked at {peak:,.0f} MB"
    budget = summary["budget_bytes"] / _MB
    if peak <= budget:
        return f"{what} stayed {budget - peak:,.0f} MB below its budget of {budget:,.0f} MB"
    return f"{what} passed its budget of {budget:,.0f} MB by {peak - budget:,.0f} MB"


def whose_memory(summary: Mapping[str, Any]) -> str:
    """Whose a run's peak is: the process's, or what PyTorch reserved on a device."""
    device = summary.get("device", "cpu")
    return "the whole process" if device == "cpu" else f"PyTorch on {device}"


def has_moved(budgets: Sequence[tuple[float, float | None]]) -> bool:
    """Was there more than one budget?"""
    return len({size for _, size in budgets}) > 1


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
    moved = has_moved(memory.budgets)
    if moved:
        draw_budget_steps(axes, memory.budgets, memory.seconds[-1])
    levels = levels_of(summary)
    if moved:  # the peaks of different budgets say nothing beside the last of them
        levels = [level for level in levels if level.words in ("floor", "budget")]
    highest = [*memory.megabytes, *(size for _, size in memory.budgets if moved and size)]
    top = 1.12 * max(*(level.megabytes for level in levels), *highest)
    _draw_levels(axes, levels, top, lines=not moved)
    _dress(axes, memory, top, title(summary, memory.budgets), whose_memory(summary))
    path = run / "memory.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _shade_phases(axes: Any, memory: Memory) -> None:
    ends = [at for at, _ in memory.marks[1:]] + [memory.seconds[-1]]
    wide_enough = _NAMED_FROM * memory.seconds[-1]
    for (start, label), end in zip(memory.marks, ends, strict=True):
        if label in _SHADES:
            axes.axvspan(start, end, color=_SHADES[label], linewidth=0, zorder=0)
        if label in _SHADES and end - start > wide_enough:
            place = (start + end) / 2, 0.97
            across = axes.get_xaxis_transform()  # x in seconds, y from 0 to 1
            name = _SHADE_NAMES[label]
            axes.text(*place, name, transform=across, ha="center", va="top", color=_QUIET)


def draw_budget_steps(
    axes: Any, budgets: Sequence[tuple[float, float | None]], end_s: float
) -> None:
    """Draw a budget that moved (seconds, megabytes) as steps up to ``end_s``."""
    ends = [at for at, _ in budgets[1:]] + [end_s]
    corners = [
        (at, float("nan") if size is None else size)
        for (start, size), end in zip(budgets, ends, strict=True)
        for at in (start, end)
    ]
    times, heights = [at for at, _ in corners], [size for _, size in corners]
    axes.plot(times, heights, color=_BUDGET, linewidth=1.8)


def _draw_levels(axes: Any, levels: Sequence[Level], top: float, *, lines: bool) -> None:
    """Draw a line per level (or only the floor's), and its name beside its right end."""
    for level, place in zip(levels, spread([each.megabytes for each in levels], top), strict=True):
        if lines or level.words == "floor":
            axes.axhline(
                level.megabytes, color=level.colour, linestyle=level.style, linewidth=level.width
            )
        axes.text(
            *(1.012, place / top),
            f"{level.words}  {level.megabytes:,.0f} MB",
            transform=axes.transAxes,
            va="center",
            color=level.colour,
            fontweight="bold",
            fontsize=9.5,
        )


def levels_of(summary: Mapping[str, Any]) -> list[Level]:
    """The levels that a run has, lowest first."""
    kinds = (
        ("floor_bytes", "floor", _QUIET, "-", 1.2),
        ("peak_bytes", "measured peak", _MEMORY, ":", 1.6),
        ("predicted_peak_bytes", "predicted peak", _PREDICTED, "--", 1.4),
        ("budget_bytes", "budget", _BUDGET, "-", 1.8),
    )
    found = [
        Level(summary[name] / _MB, words, colour, style, width)
        for name, words, colour, style, width in kinds
        if summary.get(name) is not None
    ]
    return sorted(found, key=lambda level: level.megabytes)


def spread(heights: Sequence[float], top: float) -> list[float]:
    """Places for labels at rising ``heights``: where they would overlap, around their middle."""
    gap = _LABEL_HEIGHT * top
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _places(groups[-1], gap)[0] < _places(groups[-2], gap)[-1] + gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [place for group in groups for place in _places(group, gap)]


def _places(group: Sequence[float], gap: float) -> list[float]:
    lowest = sum(group) / len(group) - gap * (len(group) - 1) / 2
    return [lowest + gap * i for i in range(len(group))]


def _dress(axes: Any, memory: Memory, top: float, heading: str, whose: str) -> None:
    axes.set_title(heading, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=12)
    axes.set_xlabel("seconds", color=_INK)
    axes.set_ylabel(f"memory of {whose} (MB)", color=_INK)
    axes.set_ylim(0, top)
    axes.set_xlim(0, max(memory.seconds[-1], 0.1))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#dfe4e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelcolor=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_QUIET)


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
