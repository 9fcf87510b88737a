"""Undocumented properties of a node of autograd's graph."""

from __future__ import annotations

from typing import Any


def sequence_number_of(node: Any) -> int:
    """Return the node's number; nodes made later on a thread have larger ones."""
    return int(node._sequence_nr())


def saved_value(node: Any, name: str) -> Any:
    """Return what the node saved under this name, unpacked; raises AttributeError if nothing."""
    return getattr(node, "_saved_" + name)


def raw_saved(node: Any, name: str) -> Any:
    """Return the packed saved tensor of this name, or None."""
    return getattr(node, "_raw_saved_" + name, None)


def result_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the node's first result, whose gradient it will be given."""
    return tuple(node._input_metadata[0].shape)
