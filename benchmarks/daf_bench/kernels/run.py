"""``daf bench kernels``: every codec, both ways, against ``memcpy`` of the same elements.

Times are taken natively, a kernel and a copy in turn, on tensors from the first
cache's size up; instructions are counted by single-stepping one call, because times
wander and hardware counters are often out of reach.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from daf import _native as library
from daf.core.code_format import BLOCK_ELEMENTS, HEADER_BYTES_PER_BLOCK
from daf.core.code_tables import DERIVATIVE_PIECES, rotated_levels, rotated_thresholds
from daf.core.errors import KernelError
from daf.kernels.cpu.instruction_sets import instruction_sets
from daf_bench import _native
from daf_bench.harness.result import BenchResult

Progress = Callable[[str], None]
Row = dict[str, Any]

FLOAT_BYTES = 4
LARGE_COUNT = 2**25
_WIDTHS = {
    "rotated": (1, 2, 3, 4),
    "minmax": (1, 2, 4, 8),
    "mask": (1,),
    "derivative": (2, 3),
    "integers": (1, 3, 8),
}
_BARRED = {  # figure: codec, encode?, the least ratio asked of AVX-512
    "rotated_encode_vs_memcpy": ("rotated", True, 1.0),
    "rotated_decode_vs_memcpy": ("rotated", False, 1.3),
    "minmax_encode_vs_memcpy": ("minmax", True, 1.2),
    "minmax_decode_vs_memcpy": ("minmax", False, 2.0),
}
_BARRED_WIDTHS = (1, 2, 4)
_COUNTED_BLOCKS = (8, 16)  # whole batches; every step of them costs microseconds


@dataclass(frozen=True, slots=True)
class KernelsJob:
    """What is run. The defaults are the full benchmark: about fifteen minutes on two cores."""

    counts: tuple[int, ...] = (2**12, 2**16, 2**20, LARGE_COUNT)
    rounds: int = 15
    portable_largest_count: int = 2**20  # where the portable kernels would take minutes


def quick_job() -> KernelsJob:
    """The same in about two minutes: two sizes, few rounds."""
    return KernelsJob((2**16, LARGE_COUNT), 5, 2**16)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation on one instruction set."""

    instruction_set: str
    codec: str
    encode: bool
    bits: int

    @property
    def label(self) -> str:
        """For progress and pictures."""
        way = "encode" if self.encode else "decode"
        return f"{self.codec} {self.bits}-bit {way} {self.instruction_set}"

    @property
    def bytes_per_element(self) -> float:
        """Bytes read and written for one element: itself, its code, its part of a header."""
        header = HEADER_BYTES_PER_BLOCK if self.codec in ("rotated", "minmax") else 0
        return FLOAT_BYTES + self.bits / 8 + header / BLOCK_ELEMENTS


def run(job: KernelsJob, on_progress: Progress = lambda _: None) -> BenchResult:
    """Time and count everything; ``figures`` are those at 2²⁵ elements on one thread."""
    limits = list(limit_rows(job))
    rows = list(kernel_rows(job, on_progress))
    return BenchResult("kernels", [*limits, *rows], figures_of(rows), _NOTES)


_NOTES = (
    "…_vs_memcpy: the worst over 1, 2 and 4 bits of memcpy's time / the kernel's (medians over "
    "interleaved pairs), 2^25 elements, one thread, the widest instruction set",
    "avx2_worst_fraction: the least of AVX2's ratios / what is asked of AVX-512 (1.0, 1.3, 1.2, "
    "2.0); at least half is asked",
    "instructions_per_element: counted by single-stepping a call on one thread; not for portable",
)


def kernel_rows(job: KernelsJob, on_progress: Progress) -> Iterator[Row]:
    """One row for each kernel, size and number of threads."""
    for kernel in kernels():
        on_progress(kernel.label)
        instructions = instructions_per_element(kernel)
        for count in job.counts:
            if kernel.instruction_set == "portable" and count > job.portable_largest_count:
                continue
            for threads in thread_counts():
                yield timed_row(kernel, count, threads, job.rounds, instructions)


def kernels() -> Iterator[Kernel]:
    """Every codec and width, both ways, on every instruction set of this processor."""
    for name in instruction_sets():
        for codec, widths in _WIDTHS.items():
            for bits in widths:
                for encode in (True, False):
                    yield Kernel(name, codec, encode, bits)


def thread_counts() -> tuple[int, ...]:
    """One, and all cores."""
    return tuple(dict.fromkeys((1, os.cpu_count() or 1)))


def timed_row(
    kernel: Kernel, count: int, threads: int, rounds: int, instructions: float | None
) -> Row:
    """Medians of interleaved pairs."""
    pairs = _native.measure_kernel(_fields(kernel, count, threads), rounds)
    kernel_ns = statistics.median(one for one, _ in pairs)
    return {
        "part": "kernel",
        "instruction_set": kernel.instruction_set,
        "codec": kernel.codec,
        "way": "encode" if kernel.encode else "decode",
        "bits": kernel.bits,
        "elements": count,
        "threads": threads,
        "ns_per_block": kernel_ns * BLOCK_ELEMENTS / count,
        "vs_memcpy": statistics.median(copy / one for one, copy in pairs),
        "gb_per_s": kernel.bytes_per_element * count / kernel_ns,
        "instructions_per_element": instructions,
        "instructions_per_byte": instructions and instructions / kernel.bytes_per_element,
    }


def instructions_per_element(kernel: Kernel) -> float | None:
    """None where the system allows no single-stepping, and for the portable kernels.

    Those take tens of thousands of instructions a block, as the compiler pleases.
    """
    if kernel.instruction_set == "portable":
        return None
    few, many = (
        _native.count_kernel_instructions(_fields(kernel, blocks * BLOCK_ELEMENTS, 1))
        for blocks in _COUNTED_BLOCKS
    )
    if not few or not many:
        return None
    return float(many - few) / ((_COUNTED_BLOCKS[1] - _COUNTED_BLOCKS[0]) * BLOCK_ELEMENTS)


_LINES = np.linspace(-2, 2, 3 * DERIVATIVE_PIECES - 1, dtype=np.float32)  # any, of a derivative


def _fields(kernel: Kernel, count: int, threads: int) -> tuple[Any, ...]:
    tables = (0, 0, 0)
    if kernel.codec == "rotated":
        thresholds, levels = rotated_thresholds(kernel.bits), rotated_levels(*[kernel.bits] * 2)
        tables = (thresholds.ctypes.data, levels.ctypes.data, 0)
    elif kernel.codec == "derivative":
        tables = (0, 0, _LINES.ctypes.data)
    table = _kernel_table(kernel.instruction_set)
    return (table, kernel.codec, kernel.encode, kernel.bits, count, threads, *tables)


def _kernel_table(instruction_set: str) -> int:
    """The address of the library's kernels for one instruction set.

    Raises:
        KernelError: there is no such set, or both extensions were built from different sources.
    """
    if library.KERNEL_TABLE_BYTES != _native.KERNEL_TABLE_BYTES:
        raise KernelError(
            f"daf's table of kernels has {library.KERNEL_TABLE_BYTES} bytes, daf_bench was built "
            f"for {_native.KERNEL_TABLE_BYTES}; install both from the same clone"
        )
    address = library.kernel_table(instruction_set)
    if not address:
        raise KernelError(f"no instruction set {instruction_set!r} here; try {instruction_sets()}")
    return int(address)


def limit_rows(job: KernelsJob) -> Iterator[Row]:
    """What the machine itself allows: reading the floats once."""
    for count in job.counts:
        for threads in thread_counts():
            read_ns = _native.measure_read_ns(count, threads, job.rounds)
            yield {
                "part": "limit",
                "elements": count,
                "threads": threads,
                "read_gb_per_s": FLOAT_BYTES * count / read_ns,
                "ns_per_block": read_ns * BLOCK_ELEMENTS / count,
            }


def figures_of(rows: list[Row]) -> dict[str, float]:
    """The figures that the project promises."""
    widest = instruction_sets()[0]
    figures = {
        name: worst_ratio(rows, widest, codec, encode=encode)
        for name, (codec, encode, _) in _BARRED.items()
    }
    if "avx2" in instruction_sets():
        figures["avx2_worst_fraction"] = min(
            worst_ratio(rows, "avx2", codec, encode=encode) / asked
            for codec, encode, asked in _BARRED.values()
        )
    return figures


def worst_ratio(rows: list[Row], instruction_set: str, codec: str, *, encode: bool) -> float:
    """The least ``vs_memcpy`` over 1, 2 and 4 bits at the largest size, one thread."""
    rows = [row for row in rows if row["part"] == "kernel"]
    largest = max(row["elements"] for row in rows if row["instruction_set"] == instruction_set)
    ratios = (
        float(row["vs_memcpy"])
        for row in rows
        if (row["instruction_set"], row["codec"]) == (instruction_set, codec)
        and row["way"] == ("encode" if encode else "decode")
        and row["bits"] in _BARRED_WIDTHS
        and (row["elements"], row["threads"]) == (largest, 1)
    )
    return min(ratios)
