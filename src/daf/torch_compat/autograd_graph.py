"""The state of the graph that autograd builds and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from daf.core.replaced import Replaced

NO_TASK = -1  # of :func:`graph_task`: no backward pass runs on this thread

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
without_torch_function = torch._C.DisableTorchFunction  # inside, no function mode sees operators


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run aten operations as they run below autograd and autocast, seen by no mode."""
    # Made where they are entered: these guards act from then on.
    with (
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableTorchDispatch(),
        without_torch_function(),
    ):
        yield


def sequence_number() -> int:
    """Return the number of this thread's next node; earlier nodes have smaller ones."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node() -> Any:
    """Return the node whose backward runs on this thread, or None."""
    return torch._C._current_autograd_node()


def pack_hook(*, raises: bool = False) -> Any:
    """Return the saved-tensor hook in force, or None; ``raises``: where hooks are disabled."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(raises)
    return None if top is None else top[0]


def graph_task() -> int:
    """Return the number of the backward pass on this thread, or NO_TASK."""
    return int(torch._C._current_graph_task_id())


def keeps_graph() -> bool:
    """True if the backward pass that runs may run again (``retain_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def call_after_backward(function: Any) -> None:
    """Call ``function()`` after the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def storage_address(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def storage_holders(address: int) -> int:
    """Return the native references to the storage of this address."""
    return int(torch._C._storage_Use_Count(address))


def sequence_number_of(node: Any) -> int:
    """Return the node's number; nodes made later on a thread have larger ones."""
    return int(node._sequence_nr())


def saved_value(node: Any, name: str) -> Any:
    """Return what the node saved under this name, unpacked; raises AttributeError if nothing."""
    return getattr(node, "_saved_" + name)


def raw_saved(node: Any, name: str) -> Any:
    """Return the packed saved tensor of this name, or None."""
    return getattr(node, "_raw_saved_" + name, None)


def result_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the node's first result, whose gradient it will be given."""
    return tuple(node._input_metadata[0].shape)


def _run_backward(*arguments: Any, **keywords: Any) -> Any:
    try:
        return backward_errors.original(*arguments, **keywords)
    except Exception as error:
        for listener in backward_errors.listeners:
            listener(error)
        raise


_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
# Listeners are called with every error of a backward pass, and may raise another in its place.
backward_errors: Replaced[Callable[[Exception], None]] = Replaced(
    torch.autograd, _engine.__name__, _run_backward
)
