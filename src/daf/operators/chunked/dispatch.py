"""Which operators go through their batch a chunk at a time instead of whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

from daf.operators.chunked import attention, convolution, linear
from daf.torch_compat.ownership import sole_holders


def substitute(
    pack: Callable[..., Any], chunk_bytes: int | None = None
) -> Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Callable[..., Any]]:
    """What an operator mode is to run instead of an operator, where ``pack`` sees what it saves.

    ``chunk_bytes``: what a chunk of an input may take; None:
    ``chunked_backward.chunk_bytes_on``.
    """
    sole_holders()  # known before the first backward pass asks

    def chosen(
        operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Callable[..., Any]:
        if convolution.is_chunkable(operator, arguments, keywords, pack, chunk_bytes):
            return _with(chunk_bytes, convolution.conv2d)
        if linear.is_chunkable(operator, arguments, keywords, pack, chunk_bytes):
            return _with(chunk_bytes, linear.linear)
        if attention.is_chunkable(operator, arguments, keywords, pack, chunk_bytes):
            return _with(chunk_bytes, attention.attention)
        if attention.is_many_headed(operator, arguments, keywords):
            return attention.multi_head_attention(pack, chunk_bytes)
        return operator

    return chosen


def _with(chunk_bytes: int | None, operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with chunks of that size; its name, which names sites, stays."""
    if chunk_bytes is None:
        return operator
    return update_wrapper(partial(operator, chunk_bytes=chunk_bytes), operator)
