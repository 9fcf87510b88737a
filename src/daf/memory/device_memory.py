"""PyTorch's caching allocator on one device, as the memory that a budget bounds.

The figure is *reserved* bytes (design, section 1): blocks in use and cached, without the driver's
context and other libraries' allocations. Every call is a function of ``torch.cuda``, which ROCm has
too; tests substitute their own allocator.
"""

import os
from typing import Any

import torch

from daf.core.errors import PlatformError
from daf.memory.keeper import MemoryDomain
from daf.memory.statistics import Meter

# In PyTorch's order of reading.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_FUNCTIONS = (
    *("memory_reserved", "max_memory_reserved", "memory_allocated", "max_memory_allocated"),
    *("memory_stats", "reset_peak_memory_stats", "empty_cache", "mem_get_info", "synchronize"),
    *("set_per_process_memory_fraction", "get_per_process_memory_fraction"),
    *("get_device_properties", "current_device"),
)

_REFUSALS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # from the driver and cuBLAS
# From PyTorch once every algorithm was refused its workspace, but sometimes without any refusal.
_PERHAPS_REFUSALS = (
    "unable to find an engine",
    "Unable to find a valid cuDNN algorithm",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)

Backend = Any  # a module or object with these functions


def backend_of(device: torch.device) -> Backend:
    """Return PyTorch's module for a device; raises PlatformError if it counts no memory."""
    found = getattr(torch, device.type, None)
    missing = [name for name in _FUNCTIONS if not hasattr(found, name)]
    if missing:
        raise PlatformError(
            f"asked for a budget for a model on {device}; what bounds one is missing: "
            f"torch.{device.type} has no {', '.join(missing)}; move the model to the CPU or a CUDA "
            "device, or pass budget=None"
        )
    return found


class DeviceMemory(MemoryDomain):
    """One device's reserved bytes; ``backend``: its functions, by default ``backend_of`` it."""

    def __init__(self, device: torch.device, backend: Backend | None = None) -> None:
        self._backend = backend or backend_of(device)
        if str(device) == device.type:  # limits are set by device number
            device = torch.device(device.type, self._backend.current_device())
        self.device = device
        self.name = str(device)
        self._highest_bytes = 0  # up to the last ``take_allocated_peak``, which resets both peaks

    @property
    def settings(self) -> str:
        """The allocator's configuration, from its environment variable."""
        found = next((f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ), "")
        return found or "its defaults"

    def held_bytes(self) -> int:
        return int(self._backend.memory_reserved(self.device))

    def peak_bytes(self) -> int:
        return max(self._highest_bytes, int(self._backend.max_memory_reserved(self.device)))

    def reset_peak(self) -> None:
        self._highest_bytes = 0
        self._backend.reset_peak_memory_stats(self.device)

    def allocated_bytes(self) -> int:
        """Return the bytes in use now."""
        return int(self._backend.memory_allocated(self.device))

    def take_allocated_peak(self) -> int:
        """Return the most bytes in use since the last call; leaves ``peak_bytes`` unchanged."""
        peak = int(self._backend.max_memory_allocated(self.device))
        self._highest_bytes = self.peak_bytes()
        self._backend.reset_peak_memory_stats(self.device)
        return peak

    def span_peak_bytes(self) -> int:
        """Return the most bytes reserved since ``take_allocated_peak`` or ``reset_peak``."""
        return int(self._backend.max_memory_reserved(self.device))

    def refusals(self) -> int:
        """Return the number of refused allocations so far, where PyTorch counts them."""
        return int(self._backend.memory_stats(self.device).get("num_ooms", 0))

    def is_refusal(self, error: BaseException, refusals_before: int) -> bool:
        """True if an error reports refused memory; ambiguous ones count if ``refusals`` grew."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        was_refused = self.refusals() > refusals_before
        known = (*_REFUSALS, *(_PERHAPS_REFUSALS if was_refused else ()))
        return isinstance(error, RuntimeError) and any(each in str(error) for each in known)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return the device's free and total bytes."""
        free, total = self._backend.mem_get_info(self.device)
        return int(free), int(total)

    def total_bytes(self) -> int:
        """Return the bytes that shares refer to; on shared memory, not all of it can be free."""
        return int(self._backend.get_device_properties(self.device).total_memory)

    def limit_share(self) -> float:
        """Return the share of the device that PyTorch may reserve."""
        return float(self._backend.get_per_process_memory_fraction(self.device))

    def limit_to_share(self, share: float) -> None:
        """Set the share that PyTorch may reserve; what is held stays."""
        self._backend.set_per_process_memory_fraction(share, self.device)

    def release_cached(self) -> None:
        """Return cached blocks to the driver; waits for the device."""
        self._backend.empty_cache()

    def wait(self) -> None:
        self._backend.synchronize(self.device)

    def meter(self) -> Meter:
        return Meter(self.allocated_bytes, self.take_allocated_peak)
