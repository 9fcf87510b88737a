"""The stack of torch-function modes of this thread."""

from __future__ import annotations

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
