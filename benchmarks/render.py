"""Write the figures of ``benchmarks/results/*.json`` into the README; none is typed by hand.

python benchmarks/render.py            # rewrite
python benchmarks/render.py --check    # fail if the README does not say what the results say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MAIN = ROOT / "benchmarks" / "results" / "main.json"
BEGIN, END = "<!-- figures: main -->", "<!-- /figures -->"
MB = 1e6


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


def rendered(text: str) -> str:
    """The README with its figures replaced by those of the results; without results, by none."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    table = main_figures(json.loads(MAIN.read_text())) + "\n" if MAIN.exists() else ""
    return f"{before}{BEGIN}\n{table}{END}{after}"


def run(check: bool) -> int:
    """Rewrite or check the README; the process's exit code."""
    text = README.read_text()
    wanted = rendered(text)
    if check:
        return 0 if text == wanted else 1
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(run(check="--check" in sys.argv[1:]))
