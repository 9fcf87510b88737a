"""What autograd knows of the graph that it builds and runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NO_TASK = -1  # of :func:`graph_task`: no backward pass runs on this thread

without_torch_function = torch._C.DisableTorchFunction  # inside, no function mode sees operators


def sequence_number() -> int:
    """The number that the next node made on this thread gets; earlier nodes have smaller ones."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node() -> Any:
    """The node whose backward runs on this thread; None: there is none."""
    return torch._C._current_autograd_node()


def pack_hook(*, raises: bool = False) -> Any:
    """The saved-tensor hook that autograd would call now, or None.

    ``raises``: where hooks are disabled, say so.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(raises)
    return None if top is None else top[0]


def graph_task() -> int:
    """The backward pass that runs on this thread."""
    return int(torch._C._current_graph_task_id())


def keeps_graph() -> bool:
    """True if the backward pass that runs may run again (``retain_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def call_after_backward(function: Any) -> None:
    """Call ``function()`` when the backward pass that runs has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def storage_address(tensor: Tensor) -> int:
    """What names a tensor's storage for as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def storage_holders(address: int) -> int:
    """How many hold the storage of this address, in native code."""
    return int(torch._C._storage_Use_Count(address))
