"""Snapshots of what a pass may change: random states, buffers, Python state, parameters too."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from daf.core.errors import CommittedStepError
from daf.core.replaced import replaced
from daf.memory.process_memory import CPU
from daf.recompute.python_state import PythonState, Surroundings, is_other_value
from daf.recompute.random_state import Generators
from daf.step.other_leaves import OtherLeaves
from daf.torch_compat.autograd_graph import (
    is_strided,
    storage_address,
    version_of,
    without_torch_function,
)
from daf.torch_compat.modules import modules_of
from daf.torch_compat.pytree import tensors_in_batch

_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"} | {
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
}


class StateSnapshot:
    """Copies of a model's buffers, its Python state and the random states.

    Those are PyTorch's, CUDA's if used, NumPy's and Python's. Globals that the model's methods
    name, and what its hooks and ``loss_fn`` close over, count as its state.
    ``holds_tensors``: tensors in attributes are held and copied too.
    """

    _generators: ClassVar = Generators()  # NumPy's state is read again only where it changed

    def __init__(self, around: Surroundings, *, holds_tensors: bool = True) -> None:
        self._model, self.others = around.model, OtherLeaves()
        gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        self._random = self._generators.state(torch.device("cuda", gpu) for gpu in range(gpus))
        self._elsewhere = around.state_elsewhere(holds_tensors=holds_tensors)
        named = self._model.named_buffers() if any(e._buffers for e in around.modules) else ()
        self._buffers = {name: each.clone() for name, each in named if not is_lazy(each)}
        self._attributes = PythonState(around.modules, holds_tensors=holds_tensors)
        self._hooks = {id(hooks): {*hooks} for hooks in _hooks_of(around.modules) if hooks}
        self._tensors = [
            (each, version_of(each), each.detach().clone()) for each in self._attributes.tensors()
        ]

    def restore(self) -> None:
        """Restore everything; may be called any number of times.

        A tensor that replaced a buffer gets the buffer's value. A buffer that is new or has another
        shape now is the module's own cache and stays.
        """
        self.restore_random()
        self._attributes.put_back()
        self._elsewhere.put_back()
        self._remove_later_hooks()
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                if version_of(tensor) != version:
                    tensor.copy_(copy)
            for name, buffer in self._model.named_buffers():
                value = self._buffers.get(name)
                if value is not None and value.shape == buffer.shape:
                    with torch.inference_mode() if buffer.is_inference() else nullcontext():
                        buffer.copy_(value)

    def _remove_later_hooks(self) -> None:
        """Remove hooks that forward itself has registered since, as attributes may say it has not.

        Models of transformers register those that collect outputs in their first pass.
        """
        for hooks in _hooks_of(modules_of(self._model)):
            for key in hooks.keys() - self._hooks.get(id(hooks), set()):
                if not _is_ours(hooks[key]):
                    del hooks[key]

    def has_changed(self) -> bool:
        """True if anything that Python keeps is another object since, or a tensor was written."""
        kept = (self._attributes, self._elsewhere)
        return any(each.changes() or each.written() for each in kept)

    def has_moved(self) -> bool:
        """True if a number or tensor that Python keeps has another value since."""
        kept = (self._attributes, self._elsewhere)
        return any(each.written() or any(map(is_other_value, each.changes())) for each in kept)

    def has_drawn(self) -> bool:
        """True if somebody drew from a generator of its own since."""
        return self._attributes.has_drawn() or self._elsewhere.has_drawn()

    def restore_random(self) -> None:
        """Restore the random states."""
        self._random.restore()
        self._elsewhere.restore_generators()


def _hooks_of(modules: list[nn.Module]) -> Iterator[dict[int, Any]]:
    for part in modules:
        yield part._forward_pre_hooks
        yield part._forward_hooks


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith("daf.")


class ParameterWrites(TorchFunctionMode):
    """Copies parameters before forward itself writes them (a teacher's, say), to ``restore``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        strided = filter(is_strided, model.parameters())
        self._unwritten = {storage_address(each): each for each in strided}
        self.written: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its memory, values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; PyTorch calls this."""
        kwargs = kwargs or {}
        if _is_writing(func) or "out" in kwargs:
            with without_torch_function():
                first = args[:1] or dict(kwargs)
                for each in tensors_in_batch((first, kwargs.get("out"))):
                    self._note(each)
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor) -> None:
        if is_strided(tensor):
            parameter = self._unwritten.pop(storage_address(tensor), None)
            if parameter is not None:
                data = parameter.data
                self.written.append((parameter, data, data.clone()))

    def restore(self) -> None:
        """Give every parameter that was written its memory and values back."""
        with torch.no_grad():
            for parameter, data, values in self.written:
                data.copy_(values)
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data


@lru_cache(maxsize=4096)
def _is_writing(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name == "__set__":
        return bool(function == Tensor.data.__set__)  # type: ignore[attr-defined]
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return in_place or name in _WRITING


@contextmanager
def preserved_state(
    model: nn.Module, loss_fn: Any = None, *, gradients: bool = False
) -> Iterator[StateSnapshot]:
    """Restore a ``StateSnapshot``, and parameters that forward wrote, at the end; after errors too.

    ``gradients``: set gradients aside as well, with those of ``others`` once the body tells them a
    loss; it finds none, and its own are dropped. Hooks on gradients that have been accumulated do
    not run inside: they may update parameters.
    """
    snapshot = StateSnapshot(around := Surroundings.of(model, loss_fn))
    kept = [(each, each.grad) for each in around.parameters if gradients and each.is_leaf]
    snapshot.others = OtherLeaves(around.parameters, around.parameters_elsewhere() * gradients)
    for parameter, _ in kept:
        parameter.grad = None
    writes = ParameterWrites(model)
    hooks = [each._post_accumulate_grad_hooks or {} for each in model.parameters()]
    paused = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        with writes, replaced(parametrize, _cache_enabled=0):  # each pass has a graph of its own
            yield snapshot
    finally:
        for each, found in zip(hooks, paused, strict=True):
            each.update(found)
        snapshot.restore()
        writes.restore()
        snapshot.others.put_back()
        for parameter, gradient in kept:
            parameter.grad = gradient


_nodes = threading.local()  # each thread numbers its nodes


def _oldest_node(device: torch.device) -> Tensor:
    nodes: dict[str, Tensor] = vars(_nodes)
    if str(device) not in nodes:
        gpu = device if device.type == "cuda" else None  # its passes go through a queue of its own
        with torch.enable_grad():
            nodes[str(device)] = torch.zeros((), requires_grad=True, device=gpu) * 1.0
    return nodes[str(device)]


def _place(parameter: Tensor) -> tuple[int, int]:
    return version_of(parameter), parameter.data_ptr()


class StepSnapshot(StateSnapshot):
    """Taken before a step that may be retried; owns a node older than its graph, on ``device``."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around, holds_tensors=False)
        self._places = [(e, _place(e)) for e in around.parameters if is_strided(e)]
        self.device = around.parameters[0].device if around.parameters else CPU
        self._oldest = _oldest_node(self.device)

    def check_parameters(self) -> None:
        """Raise CommittedStepError if a failed step has changed parameters in its forward pass."""
        if any(_place(each) != place for each, place in self._places):
            raise CommittedStepError(
                "the step failed after its forward pass itself had changed parameters (a teacher's "
                "say), so it cannot be run again; load the last checkpoint, and change those "
                "parameters between steps, or train with a larger budget"
            )

    def forget_backward(self) -> None:
        """Free what a backward pass that failed half-way still holds.

        PyTorch keeps the pass's tasks, and their graph, in the thread's queue until another pass
        drains it. Youngest nodes go first, so a pass through the oldest node drains all.
        """
        self._oldest.backward(retain_graph=True)  # type: ignore[no-untyped-call]
