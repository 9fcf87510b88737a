"""Module calls and backward passes of loops that are not DAF's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

# Given a module, its arguments and keywords; None leaves the call alone.
Around = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[object] | None
]
_call_module = nn.Module.__call__
_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


@contextmanager
def around_calls(around: Around) -> Iterator[None]:
    """Run module calls in the body within what ``around`` returns; calls inside one run as usual.

    Calls in a backward pass (replays, checkpoints) are left alone too.
    """
    before = nn.Module.__call__

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        is_backward = torch._C._current_graph_task_id() >= 0
        entered = None if is_backward else around(module, arguments, keywords)
        if entered is None:
            return before(module, *arguments, **keywords)
        outside, nn.Module.__call__ = nn.Module.__call__, _call_module  # type: ignore[method-assign]
        try:
            with entered:
                return _call_module(module, *arguments, **keywords)
        finally:
            nn.Module.__call__ = outside  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


class BackwardErrors:
    """Tells listeners of errors of backward passes; PyTorch's function is replaced meanwhile."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Exception], None]] = []

    def add(self, listener: Callable[[Exception], None]) -> None:
        """Call ``listener``, which may raise an error in its place, with every error."""
        self._listeners.append(listener)
        torch.autograd._engine_run_backward = self._run  # type: ignore[attr-defined]

    def remove(self, listener: Callable[[Exception], None]) -> None:
        """Tell ``listener`` nothing more."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]

    def _run(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return _run_backward(*arguments, **keywords)
        except Exception as error:
            for listener in [*self._listeners]:
                listener(error)
            raise


backward_errors = BackwardErrors()
