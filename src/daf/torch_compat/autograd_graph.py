"""The state of the graph that autograd builds and runs, and what its tensors consist of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level
from torch.nn.parameter import Parameter, is_lazy

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


@contextmanager
def saved_tensor_hooks(pack: Any, unpack: Any) -> Iterator[None]:
    """Call these for what is saved inside; but not what torch.func saves, which refuses hooks."""
    with _disabling.told(pack), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def _disabled(message: str) -> Iterator[None]:
    before = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        # The user's own hooks fail as they do without ours.
        fails = pack_hook() not in _disabling.listeners
        torch._C._autograd._saved_tensors_hooks_disable(message, fails)
        yield
    finally:
        if before is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(before, False)


_disabling: Replaced[Any] = Replaced(torch.autograd.graph, "disable_saved_tensors_hooks", _disabled)


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


class StorageReference(int):
    """A weak reference: a storage's address, which no other gets while this lives."""

    __slots__ = ()

    def __new__(cls, storage: torch.UntypedStorage) -> "StorageReference":
        address: Any = storage._weak_ref()
        return int.__new__(cls, address)

    def expired(self) -> bool:
        """True if the storage is gone."""
        return bool(torch.UntypedStorage._expired(int(self)))

    def __del__(self, free: Any = torch.UntypedStorage._free_weak_ref) -> None:
        free(int(self))


def is_strided(tensor: Tensor) -> bool:
    """True if a tensor is its shape, its strides and a storage, and nothing else.

    False for sparse, lazy, nested and ``torch.func``'s tensors, and for subclasses around others.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if type(tensor) in (Tensor, Parameter):
        return not is_functorch_wrapped_tensor(tensor)
    try:
        return not is_lazy(tensor) and tensor.untyped_storage().data_ptr() >= 0
    except RuntimeError:  # a wrapper of others has no memory itself
        return False


# What gives a tensor's inner ones, by layout.
_BY_ROW = ("crow_indices", "col_indices", "values")
_BY_COLUMN = ("ccol_indices", "row_indices", "values")
_INNER: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROW),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMN),
}


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that a tensor consists of: itself, or its inner ones, or ()."""
    if is_strided(tensor):
        return (tensor,)
    if is_functorch_wrapped_tensor(tensor):
        return strided_parts(get_unwrapped(tensor))
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        names = ("values",) if tensor.is_nested else _INNER.get(tensor.layout, ())
        inner = [getattr(tensor.detach(), name)() for name in names]
    return tuple(part for e in inner if isinstance(e, Tensor) for part in strided_parts(e))


def is_transforming(given: Tensor | None = None) -> bool:
    """True inside ``torch.vmap`` and torch.func's transforms, or of a batch of gradients."""
    is_batch = given is not None and torch._C._functorch.is_legacy_batchedtensor(given)
    return is_batch or maybe_current_level() is not None


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of what a tensor consists of."""
    return sum(part.nbytes for part in strided_parts(tensor))


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph; torch.func's forward mode would wrap it at its level."""
    found = tensor.detach()
    while is_functorch_wrapped_tensor(found) and not is_functorch_wrapped_tensor(tensor):
        found = get_unwrapped(found)
    return found


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; 0 for lazy and inference ones."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version


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
