"""Nests of tensors in tuples, lists, mappings and dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

Leaf = TypeVar("Leaf")
_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


def map_nest(kind: type[Leaf], change: Callable[[Leaf], Any], nest: Any) -> Any:
    """Return the nest with every ``kind`` in it replaced by ``change`` of it, in order.

    Unchanged containers are returned themselves. Others are copied without their constructors,
    whose checks might refuse the replacement. Objects of other types are left alone.
    """
    if isinstance(nest, kind):
        return change(nest)
    if type(nest) in _ATOMS:
        return nest
    if isinstance(nest, (tuple, list)):
        left = () if kind in _ATOMS else _ATOMS
        items = [each if type(each) in left else map_nest(kind, change, each) for each in nest]
        if all(map(is_, items, nest)):
            return nest
        return nest._make(items) if hasattr(nest, "_make") else type(nest)(items)
    if isinstance(nest, Mapping):
        entries = {key: map_nest(kind, change, item) for key, item in nest.items()}
        is_same = all(map(is_, entries.values(), nest.values()))
        return nest if is_same else _like_mapping(nest, entries)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        before = {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest)}
        fields = {name: map_nest(kind, change, value) for name, value in before.items()}
        if all(map(is_, fields.values(), before.values())):
            return nest
        twin = copy.copy(nest)
        for name, item in fields.items():
            object.__setattr__(twin, name, item)  # which frozen ones allow too
        return twin
    return nest


def _like_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return entries
    if not isinstance(value, MutableMapping):
        return type(value)(entries)  # type: ignore[call-arg]
    twin = copy.copy(value)
    for key, item in entries.items():
        twin[key] = item
    return twin


def tensors_in_batch(batch: Any) -> list[Tensor]:
    """Return every tensor in a nest, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if _is_flat(batch):
        return [*batch]
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_nest(Tensor, note, batch)
    return found


def tensors_inside(batch: Any) -> list[Tensor]:
    """Return the distinct tensors in a nest and in its objects' attributes, to some depth."""
    if _is_flat(batch):
        return [*{id(each): each for each in batch}.values()]
    found: dict[int, Tensor] = {}
    _collect(batch, 4, found, set())
    return list(found.values())


def _collect(value: Any, depth: int, found: dict[int, Tensor], seen: set[int]) -> None:
    """Collect by id; no closure, which would be a cycle and hold the tensors past their time."""
    found.update((id(each), each) for each in tensors_in_batch(value))
    if depth and id(value) not in seen:
        seen.add(id(value))
        for each in _parts(value):
            _collect(each, depth - 1, found, seen)


def _is_flat(batch: Any) -> bool:
    return type(batch) in (tuple, list) and all(type(each) is Tensor for each in batch)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (Tensor, type)) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())
