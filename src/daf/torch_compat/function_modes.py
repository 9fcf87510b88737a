"""The stacks of modes and hooks of this thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
