"""What a module call was given, held so that the call can be run again from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.saved_tensors.packed_tensor import PackedTensor
from daf.torch_compat.pytree import map_nest


class _Place(NamedTuple):
    """Where a tensor was in the nest of a call's inputs."""

    number: int


class _Input(NamedTuple):
    """One tensor that a call was given."""

    held: PackedTensor
    account: Any
    requires_grad: bool
    given: Callable[[], Tensor | None]
    version: int


class Inputs:
    """What a call was given, tensors held; the same tensor given twice stays one tensor."""

    def __init__(self, given: Any, hold: Callable[[Tensor, int], tuple[PackedTensor, Any]]) -> None:
        places: dict[int, _Place] = {}
        self._tensors: list[_Input] = []

        def replace(tensor: Tensor) -> _Place:
            place = places.get(id(tensor))
            if place is None:
                place = places[id(tensor)] = _Place(len(self._tensors))
                held, account = hold(tensor, place.number)
                self._tensors.append(
                    _Input(
                        held, account, tensor.requires_grad, weakref.ref(tensor), tensor._version
                    )
                )
            return place

        self._nest = map_nest(Tensor, replace, given)

    def restore(self, scratch: Scratch) -> Any:
        """The nest again, its tensors cut off from the graph that made them."""
        tensors = [
            one.held.restore(scratch).detach().requires_grad_(one.requires_grad)
            for one in self._tensors
        ]
        return map_nest(_Place, lambda place: tensors[place.number], self._nest)

    def check_unchanged(self, path: str) -> None:
        """Refuse a call that changed its own input.

        Raises:
            SavedTensorError: it did.
        """
        for one in self._tensors:
            tensor = one.given()
            if tensor is not None and tensor._version != one.version:
                raise SavedTensorError(
                    f"asked to replay {path!r}, whose forward pass modified its input of shape "
                    f"{tuple(tensor.shape)} by an inplace operation, so that it cannot be run "
                    "again from it; replay the module around it, or let it work out of place"
                )


def distinct_tensors(nest: Any) -> Iterator[Tensor]:
    """Every tensor in a nest once, in order."""
    found: dict[int, Tensor] = {}
    map_nest(Tensor, lambda tensor: found.setdefault(id(tensor), tensor), nest)
    return iter(found.values())
