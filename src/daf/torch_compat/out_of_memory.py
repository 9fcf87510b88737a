"""A budget's refusal as an error that PyTorch's users recognise as out of memory."""

import torch

from daf.core.errors import BudgetError

# What ``find_executable_batch_size`` of Accelerate and Lightning's batch size finder look for.
_CPU_WORDS = "DefaultCPUAllocator: can't allocate memory"
_DEVICE_WORDS = "CUDA out of memory."


class BudgetOutOfMemoryError(BudgetError, torch.OutOfMemoryError):
    """A BudgetError that is also PyTorch's, so that recovery from that acts on it too."""


def out_of_memory(error: BudgetError, memory_name: str) -> BudgetError:
    """Return a refusal of a session's in ``memory_name`` as PyTorch's error too."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    words = _CPU_WORDS if memory_name == "the process" else _DEVICE_WORDS
    return BudgetOutOfMemoryError(f"{error} ({words})", error.least_bytes)
