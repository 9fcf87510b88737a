"""Several runs side by side: table cells, and the differences as sentences."""

from collections.abc import Sequence

from daf.core.units import format_bytes
from daf.report.runs import Record, Run, above_floor_bytes
from daf.report.scale import number

COLUMNS = (
    *("run", "budget", "peak", "peak above floor", "predicted", "saved for backward"),
    *("step", "examples/s", "loss", "test", "plan"),
)


def row(name: str, summary: Record) -> list[str]:
    """Return the cells under ``COLUMNS`` of the run ``name``, from its ``summary``."""
    step_ms = summary["step_ms_median"]
    return [
        name,
        _bytes(summary["budget_bytes"]),
        _bytes(summary["peak_bytes"]),
        _bytes(above_floor_bytes(summary)),
        _bytes(summary["predicted_peak_bytes"] or None),
        _bytes(summary["saved_bytes_peak"] or None),
        "–" if step_ms is None else f"{step_ms:,.0f} ms",
        "–" if summary["examples_per_s"] is None else number(summary["examples_per_s"]),
        "–" if summary["loss"] is None else f"{summary['loss']:.4f}",
        "–" if summary["metric"] is None else f"{summary['metric']:.2f}",
        f"{summary['policy'] or '–'}, micro-batches of {summary['micro_batch'] or '–'}",
    ]


LEVER_COLUMNS = ("lever", "where", "would save", "why")


def lever_row(refused: Record) -> tuple[str, str, str, str]:
    """Return the cells under ``LEVER_COLUMNS`` of a lever that was left alone."""
    saved = refused["saved_bytes"]
    size = "unknown" if saved is None else format_bytes(saved)
    where = ", ".join(refused["modules"]) or "the step"
    return refused["lever"], where, size, refused["reason"]


def findings(runs: Sequence[Run]) -> list[str]:
    """Return sentences that compare every run with the first: bytes, time and loss."""
    return [sentence for run in runs[1:] for sentence in _beside(run, runs[0])]


def _beside(run: Run, first: Run) -> list[str]:
    compared = ("model", "data", "batch_size", "seed", "threads")
    different = [name for name in compared if run.summary[name] != first.summary[name]]
    sentences = [_memory_and_time(run, first)]
    if different:
        names = ", ".join(name.replace("_", " ") for name in different)
        sentences.append(f"{run.name} and {first.name} differ in {names}: compare with care.")
    elif run.summary["steps"] != first.summary["steps"]:
        sentences.append(
            f"{run.name} made {run.summary['steps']} steps and {first.name} "
            f"{first.summary['steps']}: their losses are not comparable."
        )
    return sentences


def _memory_and_time(run: Run, first: Run) -> str:
    above, beside = run.above_floor_bytes, first.above_floor_bytes
    if above is None or not beside:
        return f"the memory of {run.name} and {first.name} above their floors is not known."
    ratio = above / beside
    memory = f"{run.name} peaked at {ratio:.2f} × the memory above the floor of {first.name}"
    ours, theirs = run.summary["step_ms_median"], first.summary["step_ms_median"]
    if not ours or not theirs:
        return f"{memory}."
    time = f"took {ours / theirs:.2f} × the time a step"
    both_worse = ratio > 1 and ours > theirs
    verdict = ", and so lost on both" if both_worse else ""
    return f"{memory} and {time}{verdict}."


def _bytes(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)
