"""Nested Python state as JSON and named tensors, and back, without pickle's code.

Dicts with simple keys, lists, tuples, numbers (floats exactly), texts, None and tensors survive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from daf.core.errors import RunFolderError

_PREFIX = "state/"


def to_plain(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split into JSON's types and the tensors they name; raises RunFolderError for others."""
    tensors: dict[str, Tensor] = {}

    def convert(item: Any) -> Any:
        if item is None or type(item) in (bool, int, float, str):
            return item
        if isinstance(item, Tensor):
            name = f"{_PREFIX}{len(tensors)}"
            tensors[name] = item
            return {"tensor": name}
        if type(item) in (list, tuple):
            return {type(item).__name__: [convert(each) for each in item]}
        if isinstance(item, dict):
            return {"dict": [[convert(key), convert(each)] for key, each in item.items()]}
        raise RunFolderError(f"a checkpoint cannot hold a {type(item).__name__}: {item!r:.80}")

    return convert(value), tensors


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore what ``to_plain`` split, tensors copied; raises RunFolderError if it is damaged."""

    def restore(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        ((kind, content),) = item.items()
        if kind == "tensor":
            return torch.clone(tensors[content])
        if kind == "dict":
            return {restore(key): restore(each) for key, each in content}
        items = [restore(each) for each in content]
        return tuple(items) if kind == "tuple" else items

    try:
        return restore(plain)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"a checkpoint's state is damaged: {error!r}") from error
