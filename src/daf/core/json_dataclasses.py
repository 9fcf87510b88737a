"""Dataclasses to JSON and back by type hints, mappings as lists of pairs; what a run resumes by."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def to_plain(value: Any) -> Any:
    """Return dataclasses as dictionaries, mappings as pairs, sequences as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return [[to_plain(key), to_plain(each)] for key, each in value.items()]
    if isinstance(value, (tuple, list, frozenset)):
        return [to_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: Any, plain: Any) -> Any:
    """Restore a ``kind`` (a hint); raises KeyError, TypeError or ValueError for other values."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        rest = [each for each in inner if each is not type(None)]
        return None if plain is None else from_plain(rest[0], plain)
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        fields = {name: from_plain(hints[name], value) for name, value in plain.items()}
        return kind(**fields)  # type: ignore[operator]
    if origin is tuple:
        kinds = [inner[0]] * len(plain) if inner[1:] == (Ellipsis,) else inner
        return tuple(from_plain(each, value) for each, value in zip(kinds, plain, strict=True))
    if origin is frozenset:
        return frozenset(from_plain(inner[0], each) for each in plain)
    if origin is not None and issubclass(origin, Mapping):
        pairs = ((from_plain(inner[0], key), from_plain(inner[1], value)) for key, value in plain)
        return MappingProxyType(dict(pairs))
    return kind(plain)


class Resumable:
    """A part with attributes that a resumed run needs, those that ``KEPT`` names.

    The class's hints say what they are; those without one are restored as JSON has them.
    """

    KEPT: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs (JSON-able)."""
        return {name: to_plain(getattr(self, name)) for name in self.KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; other keys are ignored."""
        hints = _hints(type(self))  # type: ignore[arg-type]
        for name in self.KEPT:
            found = state[name]
            setattr(self, name, from_plain(hints[name], found) if name in hints else found)
