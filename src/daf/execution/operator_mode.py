"""Knowing which operator runs: a function mode that tells when each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


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


class OperatorMode(TorchFunctionMode):
    """Tells a listener of every operator that is called while this mode is on top.

    Python composites such as ``F.multi_head_attention_forward`` are one
    operator: what they call inside is not told. ``Tensor.backward`` is none:
    what backward recomputes (checkpointing) is told operator by operator.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator and tell the listener; PyTorch calls this."""
        keywords = kwargs or {}
        if func is Tensor.backward:
            with self:
                return _backward(*args, **keywords)
        listener = self._listener
        state = listener.begin(func, args)
        try:
            result = func(*args, **keywords)
        except BaseException:
            listener.abandon(state)
            raise
        listener.end(state, func, args, keywords, result)
        return result


def _backward(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """``Tensor.backward`` without its own look for function modes, which would never end."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
