"""The memory that a budget bounds: the whole process's, or what PyTorch reserves on a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from daf.core.errors import PlatformError
from daf.memory import account_meter, process_memory
from daf.memory.account_meter import Meter
from daf.memory.device_limit import DeviceKeeper
from daf.memory.device_memory import DeviceMemory
from daf.memory.limit_protocol import GiveBack, Keeper
from daf.memory.process_limit import MemoryKeeper
from daf.memory.statistics import stats


class MemoryDomain(Protocol):
    """Bytes now and at peak, and when they are. ``name``: in messages."""

    name: str

    def held_bytes(self) -> int:
        """Held now, blocks for reuse included."""

    def account_bytes(self) -> int:
        """What of that is an allocator's whose bound is known; the rest grows by itself."""

    def peak_bytes(self) -> int:
        """The most held since ``reset_peak``."""

    def reset_peak(self) -> object:
        """Begin a new peak."""

    def wait(self) -> None:
        """Until everything that was asked of the device is done, so that a clock tells."""

    def meter(self) -> Meter:
        """The best there is for the peaks of single moments."""


class ProcessMemory:
    """The resident size of this process: the budget of a model on the processor."""

    name = "the process"

    def held_bytes(self) -> int:
        """Resident now."""
        return process_memory.resident_bytes()

    def account_bytes(self) -> int:
        """What our allocator holds of it."""
        return stats()["held_bytes.current"]

    def peak_bytes(self) -> int:
        """The operating system's high-water mark."""
        return process_memory.peak_bytes()

    def reset_peak(self) -> bool:
        """Begin a new one; False where the system does not let us."""
        return process_memory.reset_peak()

    def wait(self) -> None:
        """A processor is done when it returns."""

    def meter(self) -> Meter:
        """Our allocator's account, or samples."""
        return account_meter.open_meter()


def device_of(model: nn.Module) -> torch.device:
    """Of its first parameter; the processor where there are none."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def memory_of(model: nn.Module) -> MemoryDomain:
    """Of the device that a model's parameters are on.

    Raises:
        PlatformError: they are on several devices, or on one whose memory cannot be bounded.
    """
    devices = {each.device for each in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise PlatformError(
            f"asked for a budget for a model on {names}; it bounds one device's memory; put the "
            "model on one, or pass budget=None"
        )
    return memory_on(device_of(model))


def memory_on(device: torch.device) -> MemoryDomain:
    """The process's for the processor, else the device's.

    Raises:
        PlatformError: its memory cannot be bounded.
    """
    return ProcessMemory() if device.type == "cpu" else DeviceMemory(device)


def keeper_of(
    memory: MemoryDomain,
    give_back: GiveBack = lambda _: 0,
    give_back_there: GiveBack = lambda _: 0,
) -> Keeper:
    """What bounds this memory; ``give_back``: of the process's pool, ``_there``: of a device's."""
    if isinstance(memory, DeviceMemory):
        return DeviceKeeper(memory, give_back_there)
    return MemoryKeeper(give_back)
