"""Modules: base classes that have no public name, and calls of modules from anybody's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

from daf.torch_compat.autograd_graph import NO_TASK, graph_task

__all__ = ["AnyBatchNorm", "Around", "around_calls"]

# Given a module, its arguments and keywords; None leaves the call alone.
Around = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[object] | None
]
_call_module = nn.Module.__call__


@contextmanager
def around_calls(around: Around) -> Iterator[None]:
    """Run module calls in the body within what ``around`` returns; calls inside one run as usual.

    Calls in a backward pass (replays, checkpoints) are left alone too.
    """
    before = nn.Module.__call__

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        entered = around(module, arguments, keywords) if graph_task() == NO_TASK else None
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
