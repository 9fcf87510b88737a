"""``daf bench packing``: what bit-packing costs, and what one layout for everybody saves.

The packing-overhead analysis of DAF (arXiv 2507.07149), on the CPU. Codes of
``b`` bits are made in four ways from the same floats: quantized and packed in
one pass by the native kernel; quantized only, into bytes; packed from those
bytes into neighbours (``8 / b`` codes a byte, as a GPU thread writes them); and
turned from that layout into planes, as two backends with layouts of their own
must whenever one reads what the other wrote.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS, HEADER_BYTES_PER_BLOCK
from daf.kernels import Codec, PageFields
from daf.kernels.cpu.codecs import encode
from daf.kernels.cpu.job import Job
from daf_bench.harness.result import BenchResult, median_ratio
from daf_bench.harness.timing import interleaved_ms

WIDTHS = (1, 2, 4)  # those that divide a byte


@dataclass(frozen=True, slots=True)
class PackingJob:
    """What is run: so many elements, so many rounds, on one thread."""

    count: int = 2**24
    rounds: int = 15


def quick_job() -> PackingJob:
    """The same in seconds."""
    return PackingJob(2**20, 5)


def run(job: PackingJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Time every stage at every width; figures are at 2 bits, shares of quantize and pack."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_row(job, bits, on_progress) for bits in WIDTHS]
    finally:
        torch.set_num_threads(threads)
    at_two = rows[WIDTHS.index(2)]
    figures = {
        "packing_share": at_two["packing_share"],
        "relayout_share": at_two["relayout_share"],
        "fused_vs_memcpy": at_two["memcpy_ms"] / at_two["fused_ms"],
        "fused_speed_vs_stages": at_two["fused_speed_vs_stages"],
    }
    notes = (
        f"{job.count:,} floats, one thread, medians of {job.rounds} interleaved rounds",
        "packing_share: pack / (quantize + pack), PyTorch's own operators; relayout_share: turning "
        "the packed bytes into another backend's layout / all three; "
        "fused_speed_vs_stages: quantize + pack / the native pass that ends in the shared layout",
    )
    return BenchResult("packing", rows, figures, notes)


def _row(job: PackingJob, bits: int, on_progress: Callable[[str], None]) -> dict[str, Any]:
    on_progress(f"{bits} bits")
    calls = _stages(job.count, bits)
    times = interleaved_ms(calls, job.rounds)
    quantize, pack, relayout, fused, copied = (
        statistics.median(times[name])
        for name in ("quantize", "pack", "relayout", "fused", "memcpy")
    )
    both = [one + other for one, other in zip(times["quantize"], times["pack"], strict=True)]
    return {
        "part": "packing",
        "bits": bits,
        "elements": job.count,
        "quantize_ms": quantize,
        "pack_ms": pack,
        "relayout_ms": relayout,
        "fused_ms": fused,
        "memcpy_ms": copied,
        "packing_share": pack / (quantize + pack),
        "relayout_share": relayout / (quantize + pack + relayout),
        "fused_speed_vs_stages": median_ratio(both, times["fused"]),
    }


def _stages(count: int, bits: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator)
    codes = quantized(values, bits)
    packed = packed_neighbours(codes, bits)
    headers_bytes = count // BLOCK_ELEMENTS * HEADER_BYTES_PER_BLOCK
    planes = torch.empty(bits * count // 8 + headers_bytes, dtype=torch.uint8)
    other = torch.empty_like(values)
    fields, key = PageFields.flat(planes.data_ptr(), count, bits), 1
    return {
        "quantize": lambda: quantized(values, bits),
        "pack": lambda: packed_neighbours(codes, bits),
        "relayout": lambda: write_planes(unpacked_neighbours(packed, bits), bits, planes),
        "fused": lambda: encode(
            Codec.MINMAX, Job(1, len(values), source=values.data_ptr(), pages=fields, key=key)
        ),
        "memcpy": lambda: np.copyto(other.numpy(), values.numpy()),
    }


def quantized(values: Tensor, bits: int) -> Tensor:
    """Min-max codes of float32 ``[count]`` in blocks of 256, stochastically rounded: uint8."""
    blocks = values.view(-1, BLOCK_ELEMENTS)
    least, greatest = torch.aminmax(blocks, dim=1, keepdim=True)
    levels = 2**bits - 1
    scale = levels / (greatest - least).clamp_min_(torch.finfo(torch.float32).tiny)
    scaled = (blocks - least).mul_(scale).add_(torch.rand_like(blocks)).floor_()
    return scaled.clamp_(0, levels).to(torch.uint8).view(-1)


def packed_neighbours(codes: Tensor, bits: int) -> Tensor:
    """``8 / bits`` neighbouring codes in a byte, the first one lowest: uint8 ``[count·bits/8]``."""
    groups = codes.view(-1, 8 // bits)
    packed = groups[:, 0].clone()
    for index in range(1, 8 // bits):
        packed |= groups[:, index] << (bits * index)
    return packed


def unpacked_neighbours(packed: Tensor, bits: int) -> Tensor:
    """The codes that ``packed_neighbours`` packed."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes: Tensor = ((packed[:, None] >> shifts) & (2**bits - 1)).view(-1)
    return codes


def write_planes(codes: Tensor, bits: int, planes: Tensor) -> None:
    """Codes (uint8) as planes, the layout of ``docs/format.md``, by the native kernel."""
    fields = PageFields.flat(planes.data_ptr(), len(codes), bits)
    job = Job(1, len(codes), source=codes.data_ptr(), pages=fields, item_bytes=1)
    encode(Codec.INTEGERS, job)


def draw_packing(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of stages, one on top of the other, beside the one native pass and ``memcpy``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.8), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    stages = {"quantize": "#9aa5b1", "pack": "#c2570c", "relayout": "#c2477f"}
    for index, row in enumerate(rows):
        bottom = 0.0
        for name, colour in stages.items():
            height = row[f"{name}_ms"]
            label = name if index == 0 else None
            axes.bar(3 * index, height, bottom=bottom, color=colour, label=label)
            bottom += height
        words = ("one native pass", "memcpy") if index == 0 else (None, None)
        axes.bar(3 * index + 1, row["fused_ms"], color="#2a78b8", label=words[0])
        axes.plot(
            (3 * index - 0.5, 3 * index + 1.5),
            [row["memcpy_ms"]] * 2,
            color="#22303c",
            label=words[1],
        )
    axes.set_xticks(
        [3 * i + 0.5 for i in range(len(rows))],
        ["1 bit" if row["bits"] == 1 else f"{row['bits']} bits" for row in rows],
    )
    axes.set_ylabel(f"ms, {rows[0]['elements']:,} floats")
    axes.set_title("What packing costs", loc="left", fontweight="bold")
    figure.legend(frameon=False, ncols=5, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
