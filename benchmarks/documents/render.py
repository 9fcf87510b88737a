"""Write the figures of ``benchmarks/results/*.json`` into the documents; none is typed by hand.

python benchmarks/documents/render.py            # rewrite tables, and draw pictures
python benchmarks/documents/render.py --check    # fail where documents and results differ
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accuracy_tables import accuracy_figures, draw_accuracy
from daf_bench.kernels.bit_packing import draw_packing
from daf_bench.kernels.plot import draw_roofline
from daf_bench.kernels.reductions_plot import draw_reduce
from daf_bench.memory.allocator_plot import draw_trade
from daf_bench.memory.pressure_plot import draw_pressure
from daf_bench.operators.plot import draw_waterfall
from daf_bench.peers.plot import draw_peers
from daf_bench.pool.plot import draw_times
from daf_bench.sweep.plot import draw_sweep
from door_tables import doors_figures
from gpu_tables import gpu_figures, gpu_kernel_figures, gpu_reduce_figures
from host_tables import hosts_figures
from operator_tables import operator_speed_figures, operators_figures
from paper_tables import experiments_table, published_figures
from papers import (
    packing_figures,
    policy_lines,
    reduce_figures,
    shared_figures,
    strategy_lines,
    varying_figures,
)
from pool_tables import pool_figures
from side_by_side import peers_figures
from value_tables import ablations_figures, levers_figures, start_figures, values_figures
from words import MB, ROOT, measured_by, picture

RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- /figures -->"
ASKED_OF_KERNELS = {
    "rotated_encode_vs_memcpy": 1.0,
    "rotated_decode_vs_memcpy": 1.3,
    "minmax_encode_vs_memcpy": 1.2,
    "minmax_decode_vs_memcpy": 2.0,
    "avx2_worst_fraction": 0.5,
}
OUTSIDE_COLUMNS = ("peak", "account_peak", "outside_peak", "outside_kept")


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


def allocator_figures(result: dict[str, Any]) -> str:
    """The allocator's tables, in Markdown: every allocator's trade, then the random limits."""
    machine, rows, figures = result["machine"], result["rows"], result["figures"]
    trade = [row for row in rows if row["part"] == "trade"]
    return "\n".join(
        [
            f"Measured by `daf bench allocator --json` ({result['notes'][0]}; "
            f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}):",
            "",
            "| workload | | allocator | step ÷ plain's | peak above floor ÷ plain's |",
            "|---|---|---|---|---|",
            *(
                f"| {row['workload']} | {row['kind']} | {row['allocator']} "
                f"| {row['step_ratio']:.3f} | {row['peak_ratio']:.3f} |"
                for row in trade
            ),
            "",
            f"Random limits: {figures['limits_tried']:,}, of which {figures['limits_trained']:,} "
            f"trained within theirs, {figures['limits_raised']:,} raised, "
            f"{figures['limits_broken']:,} left something broken. The account is off by at most "
            f"{100 * figures['accounting_error']:.2f} % of what the kernel says; a hit costs "
            f"{figures['hit_ns']:.0f} ns, allocating and freeing together.",
        ]
    )


def outside_figures(result: dict[str, Any]) -> str:
    """What libraries take, in the account and beside it, in Markdown."""
    lines = [
        measured_by(result, "outside"),
        "",
        "| library | work | MB at the peak | in the account | outside | outside after it |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "peak_bytes" in row:
            cells = (row[f"{name}_bytes"] / MB for name in OUTSIDE_COLUMNS)
            name = f"{row['library']} {row['version']}".strip()
            numbers = " | ".join(f"{cell:.0f}" for cell in cells)
            lines.append(f"| {name} | {row['does']} | {numbers} |")
    return "\n".join(lines)


def bias_figures(result: dict[str, Any]) -> str:
    """The worst squared bias and the median noise at each width, in Markdown."""
    figures = result["figures"]
    lines = [
        measured_by(result, "bias"),
        "",
        f"| bits | squared bias, worst of {figures['networks']:.0f} networks | noise, median |",
        "|---|---|---|",
    ]
    for bits in (1, 2, 3, 4):
        worst, noise = figures[f"bias_{bits}bit_worst"], figures[f"noise_{bits}bit_median"]
        lines.append(f"| {bits} | {worst:.5f} | {noise:.3f} |")
    outliers = figures["bias_outliers_worst"]
    return "\n".join([*lines, f"| 2 to 4, outlier channels | {outliers:.5f} | |"])


_WHERE = ("part", "piece", "refusal_families")
_BESIDE = ("steps_tried", "interrupts_tried", "budgets_set", "closed", "dropped", "refused")


def faults_figures(result: dict[str, Any]) -> str:
    """What each part tried, and what of it went wrong, in Markdown."""
    lines = [measured_by(result, "faults"), "", "| part | tried | went wrong |", "|---|---|---|"]
    for part in dict.fromkeys(row["part"] for row in result["rows"]):
        counts: Counter[str] = Counter()
        for row in result["rows"]:
            if row["part"] == part:
                counts.update({k: n for k, n in row.items() if k not in (*_WHERE, *_BESIDE)})
        tried = sum(n for name, n in counts.items() if name.endswith("_tried"))
        wrong = {name: n for name, n in counts.items() if not name.endswith("_tried") and n}
        words = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in wrong.items()) or "nothing"
        lines.append(f"| {part.replace('_', ' ')} | {tried:,} | {words} |")
    return "\n".join(lines)


def sweep_figures(result: dict[str, Any]) -> str:
    """The sweep's tables, in Markdown: counts, then every point of DAF's own policy."""
    rows, figures = result["rows"], result["figures"]
    points = [row for row in rows if row["part"] == "budget" and row["policy"] == "optimal"]
    by_hand = [row for row in rows if row["part"] == "static" and "step_ratio" in row]
    return "\n".join(
        [
            measured_by(result, "sweep"),
            "",
            *picture("sweep", "Throughput against memory, by policy and by hand"),
            "| | |",
            "|---|---|",
            *(f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in figures.items()),
            "",
            "| workload | budget | MB above the floor | measured | predicted | step ÷ plain's |",
            "|---|---|---|---|---|---|",
            *(f"| {row['workload']} | {row['asked']} | {point_cells(row)} |" for row in points),
            "",
            *policy_lines(rows),
            "| workload | by hand | MB above the floor | step ÷ plain's |",
            "|---|---|---|---|",
            *(
                f"| {row['workload']} | {row['strategy']} "
                f"| {(row['peak_bytes'] - row['floor_bytes']) / MB:.0f} "
                f"| {row['step_ratio']:.3f} |"
                for row in by_hand
            ),
        ]
    )


def point_cells(row: dict[str, Any]) -> str:
    """Budget, measured and predicted peak above the floor, and the step; or how it ended."""
    budget, floor = row["budget_bytes"], row["floor_bytes"]
    cells = [f"{(budget - floor) / MB:.0f}"]
    if row["outcome"] != "trained":
        least = row.get("least_bytes")
        named = f", least {(least - floor) / MB:.0f}" if least is not None else ""
        return " | ".join([*cells, row["outcome"] + named, "", ""])
    cells += [f"{(row[name] - floor) / MB:.0f}" for name in ("peak_bytes", "predicted_peak_bytes")]
    apart = f"{row['step_ratio_apart']:.2f} apart" if "step_ratio_apart" in row else ""
    return " | ".join([*cells, f"{row['step_ratio']:.3f}" if "step_ratio" in row else apart])


def policies_figures(result: dict[str, Any]) -> str:
    """SAGE's strategies at the same budgets, in Markdown, and their picture."""
    figures = {name: value for name, value in result["figures"].items() if "sage" in name}
    return "\n".join(
        [
            measured_by(result, "sweep --policies"),
            "",
            *picture("policies", "Throughput against memory, every strategy"),
            "| | |",
            "|---|---|",
            *(f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in figures.items()),
            "",
            *policy_lines(result["rows"]),
            *strategy_lines(result["rows"]),
        ]
    )


def survival_figures(result: dict[str, Any]) -> str:
    """How random models under random budgets ended, in Markdown."""
    return count_table(result, "survival", [])


def pressure_figures(result: dict[str, Any]) -> str:
    """What the pressed run did, in Markdown."""
    return count_table(result, "pressure", picture("pressure", "Budget, memory and throughput"))


def count_table(result: dict[str, Any], name: str, between: list[str]) -> str:
    """All figures of a result by name."""
    figures = result["figures"].items()
    lines = [f"| {figure.replace('_', ' ')} | {value:.4g} |" for figure, value in figures]
    return "\n".join([measured_by(result, name), "", *between, "| | |", "|---|---|", *lines])


# (document, the results that its table is made of, by what); its marker names the results.
TABLES = (
    (ROOT / "README.md", "main", main_figures),
    (ROOT / "docs" / "kernels.md", "kernels", kernel_figures),
    (ROOT / "docs" / "pool.md", "pool", pool_figures),
    (ROOT / "docs" / "allocator.md", "allocator", allocator_figures),
    (ROOT / "docs" / "limits.md", "outside", outside_figures),
    (ROOT / "docs" / "limits.md", "bias", bias_figures),
    (ROOT / "docs" / "quickstart.md", "doors", doors_figures),
    (ROOT / "docs" / "hosts.md", "hosts", hosts_figures),
    (ROOT / "docs" / "sweep.md", "sweep", sweep_figures),
    (ROOT / "docs" / "sweep.md", "faults", faults_figures),
    (ROOT / "docs" / "sweep.md", "policies", policies_figures),
    (ROOT / "docs" / "sweep.md", "survival", survival_figures),
    (ROOT / "docs" / "sweep.md", "pressure", pressure_figures),
    (ROOT / "docs" / "sensitivity.md", "accuracy", accuracy_figures),
    (ROOT / "docs" / "peers.md", "peers", peers_figures),
    (ROOT / "docs" / "papers.md", "papers", published_figures),
    (ROOT / "docs" / "papers.md", "reduce", reduce_figures),
    (ROOT / "docs" / "papers.md", "reduce_varying", varying_figures),
    (ROOT / "docs" / "operators.md", "operators", operators_figures),
    (ROOT / "docs" / "operators.md", "operator_speed", operator_speed_figures),
    (ROOT / "docs" / "papers.md", "packing", packing_figures),
    (ROOT / "docs" / "papers.md", "pack_shared", shared_figures),
    (ROOT / "docs" / "papers.md", "ablations", ablations_figures),
    (ROOT / "docs" / "recompute.md", "values", values_figures),
    (ROOT / "docs" / "planning.md", "start", start_figures),
    (ROOT / "docs" / "planning.md", "levers", levers_figures),
    (ROOT / "docs" / "gpu.md", "kernels-gpu", gpu_kernel_figures),
    (ROOT / "docs" / "gpu.md", "reduce-gpu", gpu_reduce_figures),
    (ROOT / "docs" / "gpu.md", "gpu", gpu_figures),
)
# (document, the table's name, by what): tables of several results.
COLLECTED = ((ROOT / "docs" / "papers.md", "experiments", experiments_table),)
# (picture beside the documents, the results that it is drawn from, by what).
PICTURES: tuple[tuple[str, str, Callable[[Any, Path], None]], ...] = (
    ("roofline", "kernels", draw_roofline),
    ("pool_times", "pool", draw_times),
    ("allocator", "allocator", draw_trade),
    ("operators", "operators", draw_waterfall),
    ("accuracy", "accuracy", draw_accuracy),
    ("sweep", "sweep", draw_sweep),
    ("policies", "policies", draw_sweep),
    ("pressure", "pressure", draw_pressure),
    ("peers", "peers", draw_peers),
    ("packing", "packing", draw_packing),
    ("reduce", "reduce", draw_reduce),
)


def begin(name: str) -> str:
    """The line that a table follows."""
    return f"<!-- figures: {name} -->"


def rendered(text: str, name: str, table_of: Callable[[dict[str, Any]], str]) -> str:
    """A document with its figures replaced by those of the results; without results, by none."""
    results = RESULTS / f"{name}.json"
    table = table_of(json.loads(results.read_text())) + "\n" if results.exists() else ""
    return replaced(text, name, table)


def collected(text: str, name: str, table_of: Callable[[], str]) -> str:
    """A document with a table that reads its results itself."""
    return replaced(text, name, table_of() + "\n")


def replaced(text: str, name: str, table: str) -> str:
    """A document with another table at this name's mark."""
    before, _, rest = text.partition(begin(name))
    after = rest.partition(END)[2]
    return f"{before}{begin(name)}\n{table}{END}{after}"


def draw(folder: Path) -> list[Path]:
    """Draw the picture of every result that there is; where they are."""
    drawn = []
    for name, result, draw_rows in PICTURES:
        results = RESULTS / f"{result}.json"
        if results.exists():
            drawn.append(folder / f"{name}.png")
            draw_rows(json.loads(results.read_text())["rows"], drawn[-1])
    return drawn


def run(check: bool) -> int:
    """Draw pictures and rewrite the documents, or check these; the process's exit code."""
    if not check:
        draw(ROOT / "docs")
    for write, tables in ((rendered, TABLES), (collected, COLLECTED)):
        for document, name, table_of in tables:
            text = document.read_text()
            wanted = write(text, name, table_of)
            if check and text != wanted:
                return 1
            document.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(run(check="--check" in sys.argv[1:]))
