"""Python functions of PyTorch that run with other globals than their own."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def with_globals(function: Any, name: str | None = None, **replaced: Any) -> Callable[..., Any]:
    """A copy of a Python function in which these globals are others; ``name``: its own."""
    own = {**function.__globals__, **replaced}
    copy = FunctionType(
        function.__code__,
        own,
        name or function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
