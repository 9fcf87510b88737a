"""Tables of what ran on a GPU: ``kernels-gpu.json``, ``reduce-gpu.json`` and ``gpu.json``."""

from __future__ import annotations

from typing import Any

from words import MB, measured_by

_NAMES = {"plain": "plain PyTorch", "daf": "codes", "daf_fused": "codes, fused and chunked"}


def gpu_kernel_figures(result: dict[str, Any]) -> str:
    """Shares of a copy's bandwidth at the largest count, in Markdown."""
    rows = result["rows"]
    most = max(row["elements"] for row in rows)
    shares = {
        (row["codec"], row["bits"], row["dtype"], row["way"]): row["share_of_copy_bandwidth"]
        for row in rows
        if row["elements"] == most
    }
    lines = [
        measured_by(result, "kernels --device cuda"),
        "",
        f"Shares of the bandwidth of a copy of the same {most:,} elements; 0.7 is asked of "
        "`rotated`.",
        "",
        "| codec | bits | encode, fp32 | decode, fp32 | encode, bf16 | decode, bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for codec, bits in dict.fromkeys((row["codec"], row["bits"]) for row in rows):
        cells = (
            f"{shares[codec, bits, dtype, way]:.2f}"
            for dtype in ("float32", "bfloat16")
            for way in ("encode", "decode")
        )
        lines.append(f"| `{codec}` | {bits} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *result["notes"][2:]])


def gpu_reduce_figures(result: dict[str, Any]) -> str:
    """The ratios of what is chosen to CUB's and the best, in Markdown."""
    lines = [measured_by(result, "reduce --quick"), "", "| | ratio of times |", "|---|---|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in result["figures"].items()]
    return "\n".join(lines)


def gpu_figures(result: dict[str, Any]) -> str:
    """Every job's contestants: step times, saved bytes and peaks, in Markdown."""
    plain = {
        row["workload"]: row["step_ms"] for row in result["rows"] if row["contestant"] == "plain"
    }
    lines = [
        measured_by(result, "gpu"),
        "",
        "| job | | step, ms | to plain's | saved, MB | reserved at the peak, MB |",
        "|---|---|---|---|---|---|",
    ]
    plainly = {
        row["workload"]: row["saved_bytes_plain"]
        for row in result["rows"]
        if row["saved_bytes_plain"] is not None
    }
    for row in result["rows"]:
        name, saved = row["workload"], row["saved_bytes_peak"] or plainly[row["workload"]]
        lines.append(
            f"| {name} | {_NAMES[row['contestant']]} | {row['step_ms']:.1f} "
            f"| {row['step_ms'] / plain[name]:.2f} | {saved / MB:,.0f} "
            f"| {row['peak_bytes'] / MB:,.0f} |"
        )
    return "\n".join([*lines, "", *result["notes"][1:]])
