"""Which operators go through their batch a chunk at a time instead of whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daf.execution import chunked_convolution, chunked_linear
from daf.execution.ownership import sole_holders


def substitute(
    pack: Callable[..., Any],
) -> Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Callable[..., Any]]:
    """What an operator mode is to run instead of an operator, where ``pack`` sees what it saves."""
    sole_holders()  # known before the first backward pass asks

    def chosen(
        operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Callable[..., Any]:
        if chunked_convolution.is_chunkable(operator, arguments, keywords, pack):
            return chunked_convolution.conv2d
        if chunked_linear.is_chunkable(operator, arguments, keywords, pack):
            return chunked_linear.linear
        return operator

    return chosen
