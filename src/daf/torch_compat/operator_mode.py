"""Knowing which operator runs: a function mode that tells when each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from daf.torch_compat.function_copies import with_globals


class Listener(Protocol):
    """Hears of every operator call."""

    def begin(self, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """An operator is about to run; what is returned comes back at its end."""

    def end(
        self,
        state: Any,
        operator: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        result: Any,
    ) -> None:
        """It returned ``result``."""

    def abandon(self, state: Any) -> None:
        """It raised."""


# From a function, its arguments and keywords to the function that is run with them.
Substitute = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Callable[..., Any]]


class OperatorMode(TorchFunctionMode):
    """Tells a listener of every operator that is called while this mode is on top.

    Python composites such as ``F.multi_head_attention_forward`` are one
    operator: what they call inside is not told. Backward passes are none: what
    they recompute (checkpointing) is told operator by operator.
    """

    def __init__(self, listener: Listener, substitute: Substitute | None = None) -> None:
        """Tell ``listener``; ``substitute`` may name another function to run for a call."""
        super().__init__()
        self._listener = listener
        self._substitute = substitute

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator and tell the listener; PyTorch calls this."""
        keywords = kwargs or {}
        backward_pass = _BACKWARD_PASSES.get(func)
        if backward_pass is not None:
            with self:
                return backward_pass(*args, **keywords)
        if self._substitute is not None:
            func = self._substitute(func, args, keywords)
        listener = self._listener
        state = listener.begin(func, args)
        try:
            result = func(*args, **keywords)
        except BaseException:
            listener.abandon(state)
            raise
        listener.end(state, func, args, keywords, result)
        return result


def _without_dispatch(function: Any) -> Callable[..., Any]:
    """A Python function of PyTorch that does not look for function modes, which would never end."""
    return with_globals(function, has_torch_function=lambda _tensors: False)


_backward = _without_dispatch(torch.autograd.backward)


def _tensor_backward(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """What ``Tensor.backward`` does."""
    _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARD_PASSES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        Tensor.backward: _tensor_backward,
        torch.autograd.backward: _backward,
        torch.autograd.grad: _without_dispatch(torch.autograd.grad),
    }
)
