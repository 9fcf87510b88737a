"""Tables of ``results/operators.json`` and ``operator_speed.json``."""

from __future__ import annotations

from typing import Any

from words import MB, measured_by, picture

_OPERATOR_FIGURES = (
    "peak_ratio",
    "peak_ratio_same_allocator",
    "rest_ratio",
    "step_ratio",
    "saved_ratio",
)


def operators_figures(result: dict[str, Any]) -> str:
    """Every model's ratios, the training loss, and the waterfall, in Markdown."""
    figures = result["figures"]
    models = dict.fromkeys(row["workload"] for row in result["rows"] if row["part"] == "compare")
    lines = [
        measured_by(result, "operators"),
        "",
        *picture("operators", "What each lever takes off plain's peak"),
        f"| model | {' | '.join(f'`{name}`' for name in _OPERATOR_FIGURES)} |",
        "|---|---|---|---|---|---|",
    ]
    for place, model in enumerate(models):
        prefix = "" if place == 0 else f"{model}_"
        values = (f"{figures[prefix + name]:.2f}" for name in _OPERATOR_FIGURES)
        lines.append(f"| {model} | {' | '.join(values)} |")
    if "loss_ratio" in figures:
        spread = 100 * figures["plain_loss_spread"]
        lines += [
            "",
            f"Late training loss of a ResNet-20: {figures['loss_ratio']:.3f} of plain's, whose own "
            f"spread over seeds is {spread:.1f} %.",
        ]
    return "\n".join(lines)


def operator_speed_figures(result: dict[str, Any]) -> str:
    """Every operator's time and bytes to PyTorch's, in Markdown; beside it, codes without it."""
    rows = result["rows"]
    plain, codes, ours = (
        {(row["operator"], *row["shape"]): row for row in rows if row["contestant"] == name}
        for name in ("plain", "codes", "ours")
    )
    return "\n".join(
        [
            measured_by(result, "operators --speed"),
            "",
            "| operator | shape | forward | backward | both | codes without it, both "
            "| bytes forward | bytes backward |",
            "|---|---|---|---|---|---|---|---|",
            *(
                f"| {row['operator']} | {' × '.join(map(str, row['shape']))} "
                f"| {row['forward_ratio']:.2f} | {row['backward_ratio']:.2f} "
                f"| **{row['step_ratio']:.2f}** "
                f"| {format(codes[key]['step_ratio'], '.2f') if key in codes else ''} "
                f"| {bytes_cell(row, plain[key], 'forward')} "
                f"| {bytes_cell(row, plain[key], 'backward')} |"
                for key, row in ours.items()
            ),
        ]
    )


def bytes_cell(ours: dict[str, Any], plain: dict[str, Any], way: str) -> str:
    """Megabytes that an operator moves, and PyTorch's sequence."""
    return " of ".join(f"{row[f'{way}_bytes'] / MB:.1f}" for row in (ours, plain)) + " MB"
