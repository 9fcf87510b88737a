"""Nests of tensors: tuples, lists, mappings and dataclasses, and what they are made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

Leaf = TypeVar("Leaf")


def map_nest(kind: type[Leaf], change: Callable[[Leaf], Any], nest: Any) -> Any:
    """The nest with every ``kind`` in it replaced by ``change`` of it, in order.

    Containers in which nothing changed are handed back themselves; others are
    copied without running their constructors, so that no check of theirs sees
    the replacement. Objects of any other kind are left alone.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, kind):
            return change(value)
        if isinstance(value, (tuple, list)):
            items = [walk(item) for item in value]
            return value if _same(items, value) else _like_sequence(value, items)
        if isinstance(value, Mapping):
            entries = {key: walk(item) for key, item in value.items()}
            return value if _same(entries.values(), value.values()) else _like(value, entries)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            fields = {name: walk(getattr(value, name)) for name in names}
            before = [getattr(value, name) for name in names]
            return value if _same(fields.values(), before) else _like_dataclass(value, fields)
        return value

    return walk(nest)


def _same(first: Any, second: Any) -> bool:
    return all(one is other for one, other in zip(first, second, strict=True))


def _like_sequence(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_make"):
        return value._make(items)
    return type(value)(items)


def _like(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return entries
    if not isinstance(value, MutableMapping):
        return type(value)(entries)  # type: ignore[call-arg]
    twin = copy.copy(value)
    for key, item in entries.items():
        twin[key] = item
    return twin


def _like_dataclass(value: Any, fields: dict[str, Any]) -> Any:
    twin = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(twin, name, item)  # which frozen ones allow too
    return twin
