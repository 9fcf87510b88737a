"""Write the figures of ``benchmarks/results/*.json`` into the documents; none is typed by hand.

python benchmarks/render.py            # rewrite
python benchmarks/render.py --check    # fail if a document does not say what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- /figures -->"
MB = 1e6
ASKED_OF_KERNELS = {
    "rotated_encode_vs_memcpy": 1.0,
    "rotated_decode_vs_memcpy": 1.3,
    "minmax_encode_vs_memcpy": 1.2,
    "minmax_decode_vs_memcpy": 2.0,
    "avx2_worst_fraction": 0.5,
}


def main_figures(result: dict[str, Any]) -> str:
    """The main job's table, in Markdown."""
    figures, machine = result["figures"], result["machine"]
    job, rows = result["notes"][0], result["rows"]
    rows_of_cgroup = {row.get("contestant"): row for row in rows if row["part"] == "cgroup"}
    lines = [
        f"Measured by `daf bench main --json` ({job}; {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}):",
        "",
        "| | plain PyTorch | DAF |",
        "|---|---|---|",
        f"| saved for backward | 1 | **1/{figures['saved_ratio']:.1f}** |",
        f"| step time, glibc's defaults | 1 | {figures['step_ratio']:.3f} |",
        f"| training loss, steps 150-200, worst seed | 1 | {figures['loss_ratio']:.3f} |",
        f"| process peak with a budget of {figures['budget_bytes'] / MB:.0f} MB | "
        f"{figures['plain_peak_bytes'] / MB:.0f} MB | {figures['peak_bytes'] / MB:.0f} MB "
        f"(predicted {figures['predicted_peak_bytes'] / MB:.0f}) |",
        f"| the same, plain under DAF's allocator settings | "
        f"{figures['plain_same_allocator_peak_bytes'] / MB:.0f} MB | |",
    ]
    if "plain" in rows_of_cgroup:
        ends = {name: ended(row) for name, row in rows_of_cgroup.items()}
        lines.append(f"| in a memory cgroup of that budget | {ends['plain']} | {ends['daf']} |")
    return "\n".join(lines)


def ended(row: dict[str, Any]) -> str:
    """How a run inside a cgroup ended, in words."""
    if row["killed_by_system"]:
        return "killed"
    return "finishes" if row["exit_code"] == 0 else f"ends with code {row['exit_code']}"


def kernel_figures(result: dict[str, Any]) -> str:
    """The kernels' table, in Markdown: what is asked, what was measured, instructions."""
    machine, figures = result["machine"], result["figures"]
    lines = [
        f"Measured by `daf bench kernels --json` ({machine['processor']}, "
        f"{machine['cores']} cores):",
        "",
        "| | asked | measured |",
        "|---|---|---|",
        *(
            f"| {name.replace('_', ' ')} | {asked:.1f} | {figures[name]:.2f} |"
            for name, asked in ASKED_OF_KERNELS.items()
            if name in figures
        ),
        "",
        "| 2²⁵ floats, one thread | bits | encode ÷ memcpy | decode ÷ memcpy | "
        "instructions an element |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *kernel_lines(result["rows"])])


def kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each codec, width and instruction set at the largest size."""
    timed = [row for row in rows if row["part"] == "kernel" and row["threads"] == 1]
    largest = max(row["elements"] for row in timed)
    both: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in timed:
        if row["elements"] == largest:
            key = (row["instruction_set"], row["codec"], row["bits"])
            both.setdefault(key, {})[row["way"]] = row
    return [
        f"| {codec}, {name} | {bits} | {ways['encode']['vs_memcpy']:.2f} | "
        f"{ways['decode']['vs_memcpy']:.2f} | "
        + ", ".join(f"{row['instructions_per_element'] or 0:.2f}" for row in ways.values())
        + " |"
        for (name, codec, bits), ways in both.items()
    ]


# (document, the results that its table is made of, by what); its marker names the results.
TABLES = (
    (ROOT / "README.md", "main", main_figures),
    (ROOT / "docs" / "kernels.md", "kernels", kernel_figures),
)


def begin(name: str) -> str:
    """The line that a table follows."""
    return f"<!-- figures: {name} -->"


def rendered(text: str, name: str, table_of: Callable[[dict[str, Any]], str]) -> str:
    """A document with its figures replaced by those of the results; without results, by none."""
    before, _, rest = text.partition(begin(name))
    after = rest.partition(END)[2]
    results = RESULTS / f"{name}.json"
    table = table_of(json.loads(results.read_text())) + "\n" if results.exists() else ""
    return f"{before}{begin(name)}\n{table}{END}{after}"


def run(check: bool) -> int:
    """Rewrite or check the documents; the process's exit code."""
    for document, name, table_of in TABLES:
        text = document.read_text()
        wanted = rendered(text, name, table_of)
        if check and text != wanted:
            return 1
        document.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(run(check="--check" in sys.argv[1:]))
