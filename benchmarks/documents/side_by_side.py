"""The side-by-side's tables and sentences, in Markdown."""

from __future__ import annotations

from typing import Any

from daf_bench.peers.verdicts import losses, verdicts, workloads_of
from words import MB, measured_by, picture

PEERS_HEAD = (
    "| contestant | peak above floor ÷ plain's | predicted, MB above floor "
    "| saved for backward, MB | step ÷ plain's | examples/s | last loss | gradient error |",
    "|---|---|---|---|---|---|---|---|",
)


def peers_figures(result: dict[str, Any]) -> str:
    """Where a peer wins, the figures, and every workload's table, in Markdown."""
    rows, figures = result["rows"], result["figures"]
    lines = [
        measured_by(result, "peers"),
        "",
        *picture("peers", "Time against memory, everybody on every workload"),
        "Where a peer wins:",
        "",
        *(f"- {sentence}" for sentence in losses(rows)),
        "",
        "| at half of plain's peak | DAF: peak | step | best peer: peak | step "
        "| DAF's step ÷ the peer's, in turn | DAF's speed ÷ the min-max baseline's |",
        "|---|---|---|---|---|---|---|",
        *(figures_line(name, figures) for name in workloads_of(rows)),
    ]
    for name, own in workloads_of(rows).items():
        lines += ["", f"**{name}**", "", *PEERS_HEAD, *map(peers_line, own), ""]
        lines += [f"- {sentence}" for sentence in verdicts(own)]
    return "\n".join(lines)


def figures_line(name: str, figures: dict[str, float]) -> str:
    """One workload's named figures; what could not be measured stays empty."""
    keys = ("daf_peak_ratio", "daf_step_ratio", "best_peer_peak_ratio", "best_peer_step_ratio")
    beside = ("daf_vs_best_peer_step_ratio", "speed_vs_minmax_baseline")
    found = [figures.get(f"{name}_{key}") for key in (*keys, *beside)]
    cells = ["" if value is None else f"{value:.3f}" for value in found]
    return f"| {name} | " + " | ".join(cells) + " |"


def peers_line(row: dict[str, Any]) -> str:
    """One contestant."""
    if "step_ratio" not in row:
        why = "refused" if "refused" in row else "failed" if "failed" in row else "no time left"
        return f"| {row['contestant']} | {why} | | | | | | |"
    predicted, saved, error = (
        row[name] for name in ("predicted_peak_bytes", "saved_bytes_peak", "gradient_error")
    )
    floor = row["floor_bytes"]
    return (
        f"| {row['contestant']} | {row['peak_ratio']:.3f} "
        f"| {'' if predicted is None else f'{(predicted - floor) / MB:.0f}'} "
        f"| {'' if saved is None else f'{saved / MB:.1f}'} | {row['step_ratio']:.3f} "
        f"| {row['examples_per_s']:.1f} | {row['loss']:.4f} "
        f"| {'' if error is None else f'{error:.2g}'} |"
    )
