"""Tables of the paged pool: its figures, the stress test, growth, and a training run."""

from __future__ import annotations

from typing import Any

from words import MB

MEANT_OF_POOL = {
    "op_us_at_1e6": "µs a page, the dearest operation, a million live pages; at most 1",
    "tree_us_at_1e6": "µs a tree operation, a million nodes, random keys; at most 2",
    "effective_over_theoretical_worst": "payload ÷ held, worst while half is alive; at least 0.97",
    "effective_over_theoretical_worst_at_peaks": "the same at the peak of every iteration",
    "effective_over_theoretical_drift": "last tenth of the iterations minus the first",
    "evictions_vs_fixed_increment": "pages evicted, adaptive growth ÷ 100 MB steps",
    "cap_halved_ms": "ms until the planes above a halved cap are evicted; at most 50",
    "halved_gradient_error_vs_predicted": "growth of the gradient's error ÷ the predicted growth",
    "training_effective_over_theoretical_worst": "payload ÷ held in training, worst at a peak",
    "training_effective_over_theoretical_drift": "its last tenth minus the first",
    "training_evictions_vs_fixed_increment": "its pages evicted, adaptive growth ÷ 100 MB steps",
}
STRESS_NAMES = {
    "adaptive": "the pool",
    "fixed": "the pool, 100 MB steps",
    "best-fit": "best-fit arena",
    "malloc": "glibc malloc",
    "malloc-return": "glibc malloc returning large blocks",
}


def pool_figures(result: dict[str, Any]) -> str:
    """The pool's tables, in Markdown: the figures, the stress test, the two rules of growth."""
    machine, figures, rows = result["machine"], result["figures"], result["rows"]
    stress = {row["contestant"]: row for row in rows if row["part"] == "stress"}
    growth = {row["rule"]: row for row in rows if row["part"] == "growth"}
    return "\n".join(
        [
            f"Measured by `daf bench pool --json` ({machine['processor']}, "
            f"{machine['cores']} cores):",
            "",
            "| | |",
            "|---|---|",
            *(f"| {words} | {figures[name]:.3f} |" for name, words in MEANT_OF_POOL.items()),
            "",
            "| 10,000 iterations of random widths and sizes | payload ÷ held: worst "
            "| worst at a peak | mean at peaks |",
            "|---|---|---|---|",
            *(
                f"| {words} | {stress[name]['worst']:.3f} | {stress[name]['worst_at_peaks']:.3f} "
                f"| {stress[name]['mean_at_peaks']:.3f} |"
                for name, words in STRESS_NAMES.items()
            ),
            "",
            *_growth_lines("growth", growth),
            "",
            *_training_lines([row for row in rows if row["part"] == "training"]),
        ]
    )


def _growth_lines(what: str, growth: dict[str, Any]) -> list[str]:
    return [
        f"| {what} | pages evicted | mean held | seconds |",
        "|---|---|---|---|",
        *(
            f"| {rule} | {row['evicted_pages']:,} | {row['mean_held_bytes'] / MB:.0f} MB "
            f"| {row['seconds']:.1f} |"
            for rule, row in growth.items()
        ),
    ]


def _training_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The training run: its own pool, its requests on contestants, page sizes, rules of growth."""
    own, *played = rows
    growth = {row["rule"]: row for row in played if row["what"] == "growth"}
    mean_bits = f"{own['least_mean_bits']:.2f} to {own['most_mean_bits']:.2f}"
    return [
        f"ResNet-20 trained for {own['steps']:,} steps with widths that moved after each (their "
        f"mean from {mean_bits} bits). Where forward passes ended, its own pool held "
        f"{own['mean_at_peaks']:.4f} of payload to each byte on the mean, "
        f"{own['worst_at_peaks']:.4f} at worst; the loss fell from {own['first_loss']:.2f} to "
        f"{own['last_loss']:.3f}. The same requests, played:",
        "",
        "| on | pages | payload ÷ held: worst | worst at a peak | mean at peaks | seconds |",
        "|---|---|---|---|---|---|",
        *(
            f"| {STRESS_NAMES[row['contestant']]} | {_pages(row)} | {row['worst']:.3f} "
            f"| {row['worst_at_peaks']:.3f} | {row['mean_at_peaks']:.3f} | {row['seconds']:.1f} |"
            for row in played
            if row["what"] != "growth"
        ),
        "",
        *_growth_lines("its growth, as large as a batch with codes of 300 MB", growth),
    ]


def _pages(row: dict[str, Any]) -> str:
    return f"{row['page_bytes']:,} bytes" if row["contestant"] == "adaptive" else ""
