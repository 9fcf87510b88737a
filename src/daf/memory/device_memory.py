"""What PyTorch's caching allocator holds on one device, as the memory that a budget bounds.

The figure is *reserved* bytes (design, section 1): blocks in use and blocks kept for
reuse. What is not PyTorch's (the driver's context, other libraries' own allocations) is
not in it. Every call is one of ``torch.cuda``'s functions, which ROCm's builds have too; tests
put an allocator of their own in their place.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from daf.core.errors import PlatformError
from daf.memory.account_meter import Meter

# In the order in which PyTorch reads them.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_FUNCTIONS = (
    "memory_reserved",
    "max_memory_reserved",
    "memory_allocated",
    "max_memory_allocated",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "get_per_process_memory_fraction",
    "empty_cache",
    "mem_get_info",
    "get_device_properties",
    "current_device",
    "synchronize",
)

# Of the driver's and of cuBLAS's.
_REFUSALS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# What PyTorch says once every way to compute something was refused its workspace, and sometimes
# where nothing was refused at all.
_PERHAPS_REFUSALS = (
    "unable to find an engine",
    "Unable to find a valid cuDNN algorithm",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)

Backend = Any  # a module or another object that has these functions


def backend_of(device: torch.device) -> Backend:
    """PyTorch's module for this kind of device.

    Raises:
        PlatformError: it has no such functions (Apple's devices, say).
    """
    found = getattr(torch, device.type, None)
    missing = [name for name in _FUNCTIONS if not hasattr(found, name)]
    if missing:
        raise PlatformError(
            f"asked for a budget for a model on {device}; what bounds one is missing: "
            f"torch.{device.type} has no {', '.join(missing)}; move the model to the CPU or a CUDA "
            "device, or pass budget=None"
        )
    return found


class DeviceMemory:
    """The reserved bytes of one device (see ``domain.MemoryDomain``).

    Args:
        device: which.
        backend: where its memory functions are; by default PyTorch's module for it.

    Raises:
        PlatformError: there are none for this kind of device.
    """

    def __init__(self, device: torch.device, backend: Backend | None = None) -> None:
        self._backend = backend or backend_of(device)
        if str(device) == device.type:  # limits are set by number
            device = torch.device(device.type, self._backend.current_device())
        self.device = device
        self.name = str(device)
        self._highest_bytes = 0  # of what ended when allocated bytes' peaks were begun anew

    @property
    def settings(self) -> str:
        """How PyTorch's allocator was configured, by its environment variable."""
        found = next((f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ), "")
        return found or "its defaults"

    def held_bytes(self) -> int:
        """Reserved now."""
        return int(self._backend.memory_reserved(self.device))

    def account_bytes(self) -> int:
        """The same: nothing that is not the allocator's is in it."""
        return self.held_bytes()

    def peak_bytes(self) -> int:
        """The most reserved since ``reset_peak``."""
        return max(self._highest_bytes, int(self._backend.max_memory_reserved(self.device)))

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._highest_bytes = 0
        self._backend.reset_peak_memory_stats(self.device)

    def allocated_bytes(self) -> int:
        """In use now."""
        return int(self._backend.memory_allocated(self.device))

    def take_allocated_peak(self) -> int:
        """The most in use since the last call; ``peak_bytes`` goes on, though both begin anew."""
        peak = int(self._backend.max_memory_allocated(self.device))
        self._highest_bytes = self.peak_bytes()
        self._backend.reset_peak_memory_stats(self.device)
        return peak

    def begin_span(self) -> None:
        """``span_peak_bytes`` begins anew; ``peak_bytes`` goes on."""
        self.take_allocated_peak()

    def span_peak_bytes(self) -> int:
        """The most reserved since ``begin_span``."""
        return int(self._backend.max_memory_reserved(self.device))

    def refusals(self) -> int:
        """Allocations that were refused so far, where PyTorch counts them."""
        return int(self._backend.memory_stats(self.device).get("num_ooms", 0))

    def is_refusal(self, error: BaseException, refusals_before: int) -> bool:
        """Does an error say that there was no memory? Libraries' own do in other words.

        Some of these count only where memory was refused since ``refusals`` was so many.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return True
        was_refused = self.refusals() > refusals_before
        known = (*_REFUSALS, *(_PERHAPS_REFUSALS if was_refused else ()))
        return isinstance(error, RuntimeError) and any(each in str(error) for each in known)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """What nobody holds, and what there is."""
        free, total = self._backend.mem_get_info(self.device)
        return int(free), int(total)

    def total_bytes(self) -> int:
        """What shares are of. Where memory is the processor's too, not all of it can be free."""
        return int(self._backend.get_device_properties(self.device).total_memory)

    def model_name(self) -> str:
        """What the device calls itself."""
        return str(self._backend.get_device_properties(self.device).name)

    def limit_share(self) -> float:
        """The share of the device that PyTorch may reserve."""
        return float(self._backend.get_per_process_memory_fraction(self.device))

    def limit_to_share(self, share: float) -> None:
        """From now on PyTorch reserves no more than this share; what is held stays."""
        self._backend.set_per_process_memory_fraction(share, self.device)

    def release_cached(self) -> None:
        """Give blocks that are not in use back to the driver; waits for the device."""
        self._backend.empty_cache()

    def wait(self) -> None:
        """Until everything that was asked of the device is done."""
        self._backend.synchronize(self.device)

    def meter(self) -> Meter:
        """Tells the peaks of what is in use, exactly."""
        return DeviceMeter(self)


class DeviceMeter:
    """Reads the allocator's own counts (see ``account_meter.Meter``)."""

    is_exact = True

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._level = 0

    def begin(self) -> None:
        """The level is what is in use now."""
        self._memory.take_allocated_peak()
        self._level = self._memory.allocated_bytes()

    def take_peak(self) -> int:
        """Exact: blocks are the allocator's from the moment that the program asks for them."""
        return self._memory.take_allocated_peak() - self._level

    def finish(self, peaks: list[int]) -> None:
        """There is nothing to correct."""
