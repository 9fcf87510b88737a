"""Live tensor memory over time by who asked for it: who holds what at the peak.

``python -m daf.report.history_picture FILE.jsonl`` reads what
``daf.memory.History.write`` wrote and draws a PNG beside it. The file imports
nothing of DAF, so that it can run where memory is short.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

REST = "everything else"
_HOLDERS = 9  # as many colours as the eye still tells apart
_COLUMNS = 1200  # moments drawn; each keeps the fullest instant that it covers
_INK = "#22303c"
_QUIET = "#8a97a3"
_REST_COLOUR = "#d5dbe0"
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Recording:
    """Bytes by holder from before, then what every event (seconds, holder, bytes) changed."""

    before: Mapping[str, int]
    events: Sequence[tuple[float, str, int]]

    def live_bytes(self) -> list[int]:
        """What was live after every event."""
        start = sum(self.before.values())
        return list(accumulate((change for _, _, change in self.events), initial=start))[1:]

    def at_peak(self) -> Counter[str]:
        """Bytes by holder after the event that left most live."""
        live = self.live_bytes()
        held = Counter(self.before)
        for _, holder, change in self.events[: live.index(max(live)) + 1]:
            held[holder] += change
        return held


@dataclass(frozen=True, slots=True)
class Bands:
    """What is stacked: a row of bytes for every name, one column for every moment."""

    seconds: Sequence[float]
    names: Sequence[str]
    rows: Sequence[Sequence[int]]


def read_recording(path: Path) -> Recording:
    """Read what ``History.write`` wrote.

    Raises:
        ValueError: it holds no event.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    before = Counter[str]()
    for line in lines:
        if line.get("before"):
            before[_holder(line)] += line["bytes"]
    events = [
        (line["seconds"], _holder(line), line["bytes"]) for line in lines if "seconds" in line
    ]
    if not events:
        raise ValueError(f"{path} holds no allocation")
    return Recording(before, events)


def _holder(line: Mapping[str, Any]) -> str:
    operator = str(line["operator"]).removeprefix("aten.").partition(".")[0]
    return " · ".join(word for word in (line["module"], operator) if word) or "(the program)"


def bands(recording: Recording, holders: int = _HOLDERS, columns: int = _COLUMNS) -> Bands:
    """The largest holders at the peak, and everything else; the peak itself is always drawn."""
    largest = [name for name, size in recording.at_peak().most_common(holders) if size > 0]
    names = [*largest, REST]
    shown = list(_columns(recording.live_bytes(), columns))
    rows: list[list[int]] = [[] for _ in names]
    place = {name: index for index, name in enumerate(largest)}
    now = [0] * len(names)
    for name, size in recording.before.items():
        now[place.get(name, len(largest))] += size
    wanted = set(shown)
    for index, (_, name, change) in enumerate(recording.events):
        now[place.get(name, len(largest))] += change
        if index in wanted:
            for row, size in zip(rows, now, strict=True):
                row.append(size)
    return Bands([recording.events[index][0] for index in shown], names, rows)


def _columns(live: Sequence[int], columns: int) -> Iterator[int]:
    """One event out of each of ``columns`` stretches: the one with most live."""
    width = max(1, -(-len(live) // columns))
    for start in range(0, len(live), width):
        stretch = live[start : start + width]
        yield start + stretch.index(max(stretch))


def draw(source: Path, path: Path) -> None:
    """Draw the recording in ``source`` as the PNG ``path``.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the recording is damaged or empty.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    recording = read_recording(source)
    found = bands(recording)
    figure = Figure(figsize=(11, 4.8), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _stack(axes, found, recording.at_peak())
    _mark_peak(axes, recording)
    axes.set_xlabel("seconds", color=_INK)
    axes.set_ylabel("live tensors (MB)", color=_INK)
    axes.set_xlim(found.seconds[0], found.seconds[-1] or 1e-3)
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def _stack(axes: Any, found: Bands, at_peak: Mapping[str, int]) -> None:
    from matplotlib import colormaps

    palette = [colormaps["tab10"](index) for index in range(len(found.names) - 1)]
    known = {name: at_peak[name] for name in found.names[:-1]}
    sizes = [*known.values(), sum(at_peak.values()) - sum(known.values())]
    labels = [
        f"{size / _MB:,.1f} MB  {name}" for name, size in zip(found.names, sizes, strict=True)
    ]
    megabytes = [[size / _MB for size in row] for row in found.rows]
    axes.stackplot(
        found.seconds, megabytes, labels=labels, colors=[*palette, _REST_COLOUR], step="post"
    )
    handles, words = axes.get_legend_handles_labels()
    axes.legend(
        *(handles[::-1], words[::-1]),  # in the order of the stack
        title="held at the peak",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=8.5,
    )


def _mark_peak(axes: Any, recording: Recording) -> None:
    live = recording.live_bytes()
    most = max(live)
    seconds = recording.events[live.index(most)][0]
    axes.axvline(seconds, color=_INK, linewidth=0.9, linestyle=":")
    heading = f"tensors peaked at {most / _MB:,.0f} MB, {seconds:,.2f} s after recording began"
    axes.set_title(heading, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=12)
    axes.tick_params(colors=_QUIET, labelcolor=_INK)


def main(arguments: Sequence[str]) -> int:
    """Draw the recording named on the command line; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m daf.report.history_picture FILE.jsonl", file=sys.stderr)
        return 2
    source = Path(arguments[0])
    try:
        draw(source, source.with_suffix(".png"))
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot draw {source}: {error}", file=sys.stderr)
        return 1
    print(source.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
