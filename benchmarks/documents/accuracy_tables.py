"""Tables and the picture of ``results/accuracy.json``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from daf_bench.accuracy.jobs import make_job
from daf_bench.accuracy.plot import draw_curves
from daf_bench.accuracy.run import metrics_of
from daf_bench.accuracy.sub_bit import WIDTHS as BELOW_WIDTHS
from words import measured_by, picture


def accuracy_figures(result: dict[str, Any]) -> str:
    """Accuracy by task and policy, what failed, bias, and the budgeted personalisation."""
    figures = result["figures"]
    kinds = {row["task"]: row for row in result["rows"] if "skipped" not in row}
    trained = [task for task, row in kinds.items() if "metrics" in row]
    lines = [measured_by(result, "accuracy"), ""]
    lines += picture("accuracy", "Accuracy against bytes held, by codec and allocation")
    for task in trained:
        lines += accuracy_table(task, result["rows"], figures)
    budgeted = [name for name in figures if name.startswith("personalisation-budget/")]
    if budgeted:
        lines += ["| adapting to a new speaker | |", "|---|---|"]
        lines += [f"| {figure_words(name)} | {figures[name]:.4g} |" for name in budgeted] + [""]
    biases = [name for name in figures if name.startswith("bias-") and name.endswith("/deviations")]
    if biases:
        lines += ["| network, codes | squared bias | standard errors | variance |"]
        lines += ["|---|---|---|---|"]
        for name in (each.removesuffix("/deviations") for each in biases):
            cells = [
                f"{figures[f'{name}/squared_bias']:.2g}",
                f"{figures[f'{name}/deviations']:.1f}",
            ]
            cells.append(f"{figures[f'{name}/variance']:.2g}")
            lines.append(f"| {name.removeprefix('bias-')} | {' | '.join(cells)} |")
        lines.append("")
    below = sorted({row["policy"] for row in result["rows"] if row["task"] == "below-one-bit"})
    if below:
        lines += below_one_bit(below, figures)
    return "\n".join(lines).rstrip("\n")


def below_one_bit(networks: list[str], figures: dict[str, float]) -> list[str]:
    """How many times fewer bytes there would be with a code of half a bit, by mean width."""
    widths = [f"{bits:g}" for bits in BELOW_WIDTHS]
    lines = [f"| fewer bytes, at bits of | {' | '.join(widths)} |", "|---" * 5 + "|"]
    for network in networks:
        found = [figures[f"below-one-bit/{network}/fewer_bytes_at_{bits}"] for bits in widths]
        lines.append(f"| {network} | {' | '.join(f'{each:.3f}' for each in found)} |")
    return lines


def draw_accuracy(rows: Any, path: Path) -> None:
    """Accuracy against bytes held, a panel for every task that was trained."""
    names = dict.fromkeys(row["task"] for row in rows if row.get("metrics"))
    job = make_job(",".join(names), "plain", 1, None, quick=False)
    draw_curves(rows, metrics_of(job), path)


def accuracy_table(task: str, rows: list[dict[str, Any]], figures: dict[str, float]) -> list[str]:
    """A line for every policy of a task, and what the task shows as a whole."""
    policies = Counter(row["policy"] for row in rows if row["task"] == task)
    ends = ("_percent", "/token_loss")
    lines = [
        f"| {task} | seeds | metric | spread | saved | step | added noise | failed, caught |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy, seeds in policies.items():
        name = f"{task}/{policy}"
        own = {
            key.removeprefix(f"{name}/"): each
            for key, each in figures.items()
            if key.startswith(f"{name}/")
        }
        metric = next((each for key, each in own.items() if f"/{key}".endswith(ends)), None)
        failed = f"{own['failed']:.0f}, {own['caught']:.0%}" if "failed" in own else ""
        ratio = f"{own['saved_ratio']:.1f}×" if "saved_ratio" in own else ""
        cells = [
            "" if metric is None else f"{metric:.2f}",
            number(own.get("spread")),
            ratio,
            *(number(own.get(key)) for key in ("step_ratio", "added_noise")),
            failed,
        ]
        lines.append(f"| {policy} | {seeds} | {' | '.join(cells)} |")
    lines.append("")
    for policy in policies:
        lines += _behind(f"{task}/{policy}", figures) + _evicted(f"{task}/{policy}", figures)
    for key in (
        "saved_ratio_within_half_point",
        "bytes_vs_best_baseline",
        "fused_bytes_vs_best_published",
    ):
        if f"{task}/{key}" in figures:
            lines += [f"{task}, {key.replace('_', ' ')}: **{figures[f'{task}/{key}']:.3g}**.", ""]
    return lines


def _behind(name: str, figures: dict[str, float]) -> list[str]:
    """How far a policy is behind plain's with the same seeds, where there are enough."""
    if f"{name}/behind_plain" not in figures:
        return []
    ends = (f"{figures[f'{name}/behind_plain_{end}']:.2f}" for end in ("low", "high"))
    return [
        f"{name.replace('/', ', ')}: behind plain by **{figures[f'{name}/behind_plain']:.2f}** "
        f"({' to '.join(ends)}, 95 %, {figures[f'{name}/behind_plain_seeds']:.0f} seeds).",
        "",
    ]


def _evicted(name: str, figures: dict[str, float]) -> list[str]:
    if f"{name}/evicted_share" not in figures:
        return []
    share = figures[f"{name}/evicted_share"]
    return [f"{name.replace('/', ', ')}: {share:.0%} of its codes go in every second step.", ""]


def number(value: float | None) -> str:
    """Three digits, or nothing."""
    return "" if value is None else f"{value:.3g}"


def figure_words(name: str) -> str:
    """A figure's name without its task, as words."""
    return name.partition("/")[2].replace("/", ", ").replace("_", " ")
