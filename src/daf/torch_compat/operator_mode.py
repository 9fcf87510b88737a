"""Modes that see operators, their stacks, and copies of PyTorch's functions for use inside them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # documented, but in a private module

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]
Runner = Callable[[Callable[..., Any], Arguments, Keywords], Any]
# The softmax of PyTorch's own composite attention, where rows of -inf alone become 0.
safe_softmax, softmax_backward = torch._safe_softmax, torch._softmax_backward_data


class OperatorMode(TorchFunctionMode):
    """Passes every operator called while this mode is on top to a runner.

    A Python composite such as ``F.multi_head_attention_forward`` is one operator. What a backward
    pass recomputes (checkpointing) is seen operator by operator.
    """

    def __init__(self, run: Runner) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (backward_pass := _BACKWARD_PASSES.get(func)) is None:
            return self._run(func, args, kwargs or {})
        with self:
            return backward_pass(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Without the compiler, which PyTorch's own would import to shield a mode from it: 150 MB.

    Models run eagerly under it (``eagerly``).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def take_modes() -> list[Any]:
    """Pop all modes; returns them, the lowest first."""
    taken = []
    while torch._C._len_torch_function_stack():
        taken.append(torch._C._pop_torch_function_stack())
    return taken[::-1]


def push_modes(modes: list[Any]) -> None:
    """Push modes, the first lowest."""
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


@contextmanager
def modes_restored() -> Iterator[None]:
    """Leave the thread's stacks, and whether it records gradients, as they were before the body.

    An interrupt can come between entering a mode and noting that it was entered.
    """
    functions = torch._C._len_torch_function_stack()
    dispatches = torch._C._len_torch_dispatch_stack()
    hooks, records = _saved_tensor_hooks(), torch.is_grad_enabled()
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > dispatches:
            torch._C._pop_torch_dispatch_stack()
        while (top := _saved_tensor_hooks()) is not None and top != hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_grad_enabled(records)


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def with_globals(function: Any, name: str | None = None, **replaced: Any) -> Callable[..., Any]:
    """Return a copy of a Python function with some globals ``replaced``; ``name``: the copy's."""
    own, name = {**function.__globals__, **replaced}, name or function.__name__
    copy = FunctionType(function.__code__, own, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _without_dispatch(function: Any) -> Callable[..., Any]:
    """Return a function that looks for no function modes, which would recurse without end."""
    return with_globals(function, has_torch_function=lambda _tensors: False)


_backward = _without_dispatch(torch.autograd.backward)


def _tensor_backward(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARD_PASSES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        Tensor.backward: _tensor_backward,
        torch.autograd.backward: _backward,
        torch.autograd.grad: _without_dispatch(torch.autograd.grad),
    }
)
