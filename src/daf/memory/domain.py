"""The memory that a budget bounds: the whole process's, or what PyTorch reserves on a device."""

import torch
from torch import nn

from daf.core.errors import PlatformError
from daf.memory import process_memory
from daf.memory.device_limit import DeviceKeeper
from daf.memory.device_memory import DeviceMemory
from daf.memory.keeper import GiveBack, Keeper
from daf.memory.keeper import MemoryDomain as MemoryDomain
from daf.memory.process_limit import MemoryKeeper
from daf.memory.statistics import open_meter, stats
from daf.torch_compat.modules import parameters_of


class ProcessMemory(MemoryDomain):
    """What this process holds, resident or swapped out: the memory of a model on the CPU."""

    name = "the process"
    held_bytes = staticmethod(process_memory.taken_bytes)
    mapped_bytes = staticmethod(process_memory.mapped_bytes)
    peak_and_swapped_bytes = staticmethod(process_memory.peak_and_swapped_bytes)
    peak_bytes = staticmethod(process_memory.peak_bytes)
    reset_peak = staticmethod(process_memory.reset_peak)
    meter = staticmethod(open_meter)

    def account_bytes(self) -> int:
        return stats()["held_bytes.current"]

    def wait(self) -> None:
        pass  # the CPU is done when it returns


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((each.device for each in parameters_of(model)), torch.device("cpu"))


def memory_of(model: nn.Module) -> MemoryDomain:
    """Return the memory of a model's device; raises PlatformError for several, or one unbounded."""
    devices = {each.device for each in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise PlatformError(
            f"asked for a budget for a model on {names}; it bounds one device's memory; put the "
            "model on one, or pass budget=None"
        )
    return memory_on(device_of(model))


def memory_on(device: torch.device) -> MemoryDomain:
    """Return the process's memory for the CPU, else the device's (PlatformError if unbounded)."""
    return ProcessMemory() if device.type == "cpu" else DeviceMemory(device)


def keeper_of(
    memory: MemoryDomain, give_back: GiveBack = lambda _: 0, give_back_there: GiveBack = lambda _: 0
) -> Keeper:
    """Return the memory's keeper; it evicts by ``give_back`` (CPU) or ``give_back_there``."""
    if isinstance(memory, DeviceMemory):
        return DeviceKeeper(memory, give_back_there)
    return MemoryKeeper(give_back)
