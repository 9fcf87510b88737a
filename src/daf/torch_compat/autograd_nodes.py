"""What a node of autograd's graph tells of itself: PyTorch documents none of it."""

from __future__ import annotations

from typing import Any


def sequence_number_of(node: Any) -> int:
    """Nodes made later on a thread have larger ones."""
    return int(node._sequence_nr())


def saved_value(node: Any, name: str) -> Any:
    """What the node saved under this name; a saved tensor is unpacked for that.

    Raises:
        AttributeError: it saves nothing of that name.
    """
    return getattr(node, "_saved_" + name)


def raw_saved(node: Any, name: str) -> Any:
    """The saved tensor of this name, not unpacked; None: the node has none."""
    return getattr(node, "_raw_saved_" + name, None)


def result_shape(node: Any) -> tuple[int, ...]:
    """Of the node's first result, whose gradient it will be given."""
    return tuple(node._input_metadata[0].shape)
