"""The registry of kernels: a backend for each type of device."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from daf.core.errors import KernelError
from daf.kernels.backend import PART_BYTES, Backend
from daf.kernels.cpu.backend import CpuBackend


class _Entry(NamedTuple):
    load: Callable[[], Backend | None]
    in_host_memory: bool


@cache
def _triton() -> Backend | None:
    try:
        from daf.kernels.triton.backend import TritonBackend
    except (KernelError, ImportError):  # no Triton here
        return None
    return TritonBackend()


_native = CpuBackend()
_backends = {"cpu": _Entry(lambda: _native, True), "cuda": _Entry(_triton, False)}  # ROCm: "cuda"


def register_backend(
    device_type: str, load: Callable[[], Backend | None], *, in_host_memory: bool = False
) -> None:
    """Register the backend of a type of device, in place of any earlier one.

    ``load`` returns it, on every use; None where it cannot run. ``in_host_memory``: codes lie in
    the host's store and elements may be read at once; else codes lie in pages of the device
    (``daf.pool.device_pool``), and nothing waits for it.
    """
    _backends[device_type] = _Entry(load, in_host_memory)


def backend_on(device: torch.device) -> Backend | None:
    """Return a device's kernels; None if there are none."""
    entry = _backends.get(device.type)
    return None if entry is None else entry.load()


def backend_of(tensor: Tensor) -> Backend:
    """Return the kernels for a tensor; KernelError if its device has none."""
    if (found := backend_on(tensor.device)) is None:
        raise KernelError(
            f"asked for kernels on {tensor.device}, found none; install DAF with its extra "
            "daf-train[gpu] for a GPU's"
        )
    return found


def can_code_on(device: torch.device) -> bool:
    """True if a device has kernels; for a GPU, if Triton is installed."""
    return backend_on(device) is not None


def is_processor(device: torch.device) -> bool:
    """True unless codes of this type of device lie in its own memory."""
    entry = _backends.get(device.type)
    return entry is None or entry.in_host_memory


def is_read_freely(tensor: Tensor) -> bool:
    """True if the program may read the elements without waiting for a device."""
    return is_processor(tensor.device)


def is_coded_on_device(tensor: Tensor) -> bool:
    """True if the tensor and its codes lie in a device's own memory."""
    return not is_processor(tensor.device) and can_code_on(tensor.device)


def norm_part_bytes_on(device: torch.device) -> int:
    """Return the bytes (float32) that a fused normalisation decodes at a time; 0: a few blocks."""
    return 0 if is_processor(device) else PART_BYTES


def is_recorded(tensor: Tensor) -> bool:
    """True while a CUDA graph records; its replay would write pages that have other owners."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
