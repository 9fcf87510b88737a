"""The inputs of a module call, held so that the call can run again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.saved_tensors.packed_tensor import PackedTensor
from daf.torch_compat.autograd_graph import version_of
from daf.torch_compat.pytree import map_nest


class _Place(NamedTuple):
    """The place of a tensor in the nest of a call's inputs."""

    number: int


class _Input(NamedTuple):
    """One tensor among a call's inputs."""

    held: PackedTensor
    account: Any
    requires_grad: bool
    original: Callable[[], Tensor | None]
    version: int


class HeldInput(NamedTuple):
    """What holds one input; ``is_exact``: it comes back bit for bit.

    ``account`` keeps it counted.
    """

    held: PackedTensor
    account: Any
    is_exact: bool


class Inputs:
    """The inputs of a call, tensors held; one that appears twice is held once.

    ``are_exact`` is True if all of them come back bit for bit.
    """

    def __init__(self, nest: Any, hold: Callable[[Tensor, int], HeldInput]) -> None:
        places: dict[int, _Place] = {}
        self._tensors: list[_Input] = []
        self.are_exact = True

        def replace(tensor: Tensor) -> _Place:
            place = places.get(id(tensor))
            if place is None:
                place = places[id(tensor)] = _Place(len(self._tensors))
                held, account, is_exact = hold(tensor, place.number)
                self.are_exact &= is_exact
                original = weakref.ref(tensor)
                self._tensors.append(
                    _Input(held, account, tensor.requires_grad, original, version_of(tensor))
                )
            return place

        self._nest = map_nest(Tensor, replace, nest)

    def restore(self, scratch: Scratch) -> Any:
        """Return the nest, its tensors detached from the graph that made them."""
        tensors = [
            one.held.restore(scratch).detach().requires_grad_(one.requires_grad)
            for one in self._tensors
        ]
        return map_nest(_Place, lambda place: tensors[place.number], self._nest)

    def check_unchanged(self, path: str) -> None:
        """Raise SavedTensorError if the call, which has returned, changed an input in place."""
        for one in self._tensors:
            tensor = one.original()
            if tensor is not None and version_of(tensor) != one.version:
                raise SavedTensorError(
                    f"asked to replay {path!r}, whose forward pass modified its input of shape "
                    f"{tuple(tensor.shape)} by an inplace operation, so that it cannot be run "
                    "again from it; replay the module around it, or let it work out of place"
                )


def distinct_tensors(nest: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nest once, in order."""
    found: dict[int, Tensor] = {}
    map_nest(Tensor, lambda tensor: found.setdefault(id(tensor), tensor), nest)
    return iter(found.values())
