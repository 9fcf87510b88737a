"""``daf bench kernels --device cuda``: a GPU's codecs beside a copy of the same elements.

Every width, both ways, in fp32 and bf16, at the sizes that large tensors have. Kernel and copy take
turns, each timed between two events; what counts is the share of the copy's bandwidth, by the bytes
that each of them must move: the elements, their code and its headers, or the elements twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from daf.core.code_format import block_count, header_bytes, plane_bytes, words_per_plane
from daf.core.errors import PlatformError, UnknownNameError
from daf.core.policy import Method, Treatment
from daf.kernels.normalisation import CodedValues, Decoding
from daf_bench.harness.result import BenchResult
from daf_bench.harness.timing import device_seconds

Progress = Callable[[str], None]
ROTATED, MINMAX = "rotated", "minmax"
_WIDTHS = {ROTATED: (1, 2, 3, 4), MINMAX: (2, 4, 8)}
_KEY = 1


@dataclass(frozen=True, slots=True)
class DeviceCodecsJob:
    """What is run. The defaults are the full benchmark, which holds some gigabytes."""

    device: str
    counts: tuple[int, ...] = (2**20, 2**24, 2**28)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    rounds: int = 15


def quick_job(device: str) -> DeviceCodecsJob:
    """The same in a minute, on small tensors."""
    return DeviceCodecsJob(device, (2**20, 2**24), rounds=5)


def checked_device(name: str) -> torch.device:
    """The CUDA (or ROCm) device of that name.

    Raises:
        PlatformError: there is none; UnknownNameError: it names none.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnknownNameError(f"unknown device {name!r}; known: cuda, cuda:1 and so on") from error
    if device.type != "cuda" or not torch.cuda.is_available():
        raise PlatformError(
            f"asked to time a GPU's kernels on {name}, found no CUDA device; leave --device out "
            "to time the processor's"
        )
    return device


def run(job: DeviceCodecsJob, on_progress: Progress = lambda _: None) -> BenchResult:
    """Rows of shares; figures are the worst over 1 to 4 bits at the largest count.

    Raises:
        KernelError: Triton is not installed.
    """
    device, rows = torch.device(job.device), []
    for dtype in job.dtypes:
        for count in job.counts:
            values = torch.randn(count, generator=torch.Generator().manual_seed(0))
            values = values.to(device, dtype)
            on_progress(f"{count} {_name(dtype)}")
            rows += list(_rows(values, job.rounds))
    return BenchResult("device_codecs", rows, figures_of(rows), _notes(device, job))


def _rows(values: Tensor, rounds: int) -> Iterator[dict[str, Any]]:
    copy = torch.empty_like(values)
    for codec, widths in _WIDTHS.items():
        for bits in widths:
            for way, work in _ways(values, copy, codec, bits).items():
                kernel_s, copy_s = _in_turn(work, lambda: copy.copy_(values), values.device, rounds)
                moved = values.nbytes + plane_bytes(values.numel(), bits)
                moved += header_bytes(values.numel())
                yield {
                    "part": "device_codecs",
                    "codec": codec,
                    "bits": bits,
                    "way": way,
                    "dtype": _name(values.dtype),
                    "elements": values.numel(),
                    "kernel_ms": 1e3 * kernel_s,
                    "copy_ms": 1e3 * copy_s,
                    "share_of_copy_bandwidth": (moved / kernel_s) / (2 * values.nbytes / copy_s),
                }


def _ways(values: Tensor, out: Tensor, codec: str, bits: int) -> dict[str, Callable[[], object]]:
    from daf.kernels.triton import codecs  # needs triton, which processors alone do not
    from daf.kernels.triton.planes import flat_planes

    count, empty = values.numel(), values.new_empty
    planes = empty((bits, words_per_plane(count)), dtype=torch.int32)
    headers = empty(block_count(count), dtype=torch.int32)
    code = CodedValues(
        flat_planes(planes, headers, count, bits), Treatment(Method(codec), bits), _KEY, count
    )
    return {
        "encode": lambda: codecs.encode_values(code, values, None),
        "decode": lambda: codecs.decode_values(code, Decoding(out)),
    }


def _in_turn(
    work: Callable[[], object], copy: Callable[[], object], device: torch.device, rounds: int
) -> tuple[float, float]:
    """Median seconds of both; a first round, which compiles, is not kept."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for each, taken in zip((work, copy), found, strict=True):
            taken.append(device_seconds(each, device))
    kernel, copied = (statistics.median(taken[1:]) for taken in found)
    return kernel, copied


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Worst share of ``rotated`` over its widths, by way and number type, at the largest count."""
    most = max(row["elements"] for row in rows)
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row["codec"] == ROTATED and row["elements"] == most:
            name = f"{row['way']}_{row['dtype']}_worst_share"
            shares.setdefault(name, []).append(row["share_of_copy_bandwidth"])
    return {name: min(found) for name, found in shares.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notes(device: torch.device, job: DeviceCodecsJob) -> tuple[str, ...]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return (
        f"device: {name}; medians of {job.rounds} rounds in turn, by the device's events",
        "share: bytes that the kernel must move a second / those of a copy of the same tensor; 0.7 "
        "is asked of rotated codes at the largest count",
    )
