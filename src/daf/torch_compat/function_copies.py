"""Copies of PyTorch's Python functions that run with other globals."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def with_globals(function: Any, name: str | None = None, **replaced: Any) -> Callable[..., Any]:
    """Return a copy of a Python function with some globals ``replaced``; ``name``: the copy's."""
    own, name = {**function.__globals__, **replaced}, name or function.__name__
    copy = FunctionType(function.__code__, own, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
