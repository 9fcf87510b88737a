"""Which type of device has which kernels; others may register theirs."""

from __future__ import annotations

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
# ROCm calls itself cuda too.
_backends = {"cpu": _Entry(lambda: _native, True), "cuda": _Entry(_triton, False)}


def register_backend(
    device_type: str, load: Callable[[], Backend | None], *, in_host_memory: bool = False
) -> None:
    """Let a type of device be coded for; another registration of the type replaces it.

    Args:
        device_type: as in ``torch.device.type``.
        load: gives the backend, on every use; None where it cannot run.
        in_host_memory: codes lie in the host's store, and elements may be looked at at once;
            else in pages of the device (``daf.pool.device_pool``), and nothing waits for it.
    """
    _backends[device_type] = _Entry(load, in_host_memory)


def backend_on(device: torch.device) -> Backend | None:
    """The kernels for tensors there; None where there are none."""
    entry = _backends.get(device.type)
    return None if entry is None else entry.load()


def backend_of(tensor: Tensor) -> Backend:
    """The kernels for a tensor.

    Raises:
        KernelError: its device has none.
    """
    found = backend_on(tensor.device)
    if found is None:
        raise KernelError(
            f"asked for kernels on {tensor.device}, found none; install DAF with its extra "
            "daf-train[gpu] for a GPU's"
        )
    return found


def can_code_on(device: torch.device) -> bool:
    """True if there are kernels for tensors there; for a GPU's, if Triton is installed."""
    return backend_on(device) is not None


def is_processor(device: torch.device) -> bool:
    """True unless it is of a type whose codes lie in memory of its own."""
    entry = _backends.get(device.type)
    return entry is None or entry.in_host_memory


def is_read_freely(tensor: Tensor) -> bool:
    """True if the program may look at the elements without waiting for a device."""
    return is_processor(tensor.device)


def is_coded_on_device(tensor: Tensor) -> bool:
    """True if the tensor lies in a device's own memory, and so do codes of it."""
    return not is_processor(tensor.device) and can_code_on(tensor.device)


def norm_part_bytes_on(device: torch.device) -> int:
    """The most that a fused normalisation decodes at a time there (float32); 0: a few blocks."""
    return 0 if is_processor(device) else PART_BYTES


def is_recorded(tensor: Tensor) -> bool:
    """True while work is recorded to be run again (a CUDA graph), which would write pages again
    that have become someone else's.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
