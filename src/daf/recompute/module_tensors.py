"""The tensors of a module that a call may have read, and whether they are still the same.

A second run reads parameters, buffers and what hooks have set on the module as they are then. A
tensor that was replaced or changed since would silently give another gradient, so it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from daf.core.errors import SavedTensorError
from daf.saved_tensors.ledger import strided_parts

Slot = tuple[int, str]  # the id of a module's own dictionary, and a name in it


class _Seen(NamedTuple):
    """One tensor as it was when the call returned."""

    what: str
    name: str
    space: Mapping[str, Any]
    tensor: weakref.ref[Tensor]
    storages: tuple[StorageWeakRef, ...]  # which keep an address from being given to another
    version: int
    requires_grad: bool

    @classmethod
    def now(cls, what: str, name: str, space: Mapping[str, Any], tensor: Tensor) -> _Seen:
        parts = strided_parts(tensor)
        storages = tuple(StorageWeakRef(part.untyped_storage()) for part in parts)  # type: ignore[no-untyped-call]
        version, gradient = tensor._version, tensor.requires_grad
        return cls(what, name, space, weakref.ref(tensor), storages, version, gradient)

    def is_replaced(self) -> bool:
        then = self.tensor()
        now = self.space.get(self.name)
        if then is None or now is not then:
            return True
        there = [part.untyped_storage()._cdata for part in strided_parts(now)]
        return there != [storage.cdata for storage in self.storages]


class ModuleTensors:
    """The tensors that one call may read: make it before the call, ``finish`` it after."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self._module = module
        self._path = path
        self._attributes = dict(_own_attributes(module))
        self._seen: list[_Seen] = []

    def finish(self, unchanged: Collection[Slot]) -> None:
        """End the call; it sets buffers other than ``unchanged`` again itself."""
        for name, part in self._module.named_modules():
            prefix = f"{name}." if name else ""
            for own, parameter in part._parameters.items():
                self._see("parameter", prefix + own, part._parameters, own, parameter)
            for own, buffer in part._buffers.items():
                if (id(part._buffers), own) in unchanged:
                    self._see("buffer", prefix + own, part._buffers, own, buffer)
        for own, tensor in _own_attributes(self._module):
            if self._attributes.get(own) is tensor:
                self._see("attribute", own, vars(self._module), own, tensor)
        self._attributes.clear()

    def _see(
        self, what: str, path: str, space: Mapping[str, Any], name: str, tensor: Tensor | None
    ) -> None:
        if tensor is not None and not is_lazy(tensor):
            self._seen.append(_Seen.now(f"{what} {path!r}", name, space, tensor))

    def check_unchanged(self) -> None:
        """Check that everything is as the call left it.

        Raises:
            SavedTensorError: it is not.
        """
        for seen in self._seen:
            if seen.is_replaced():
                raise SavedTensorError(
                    f"asked to replay {self._path!r}, but its {seen.what} was replaced by another "
                    "tensor since its forward pass (by an assignment, a hook or functional_call); "
                    "replay the module around what replaces it, or do not replay this module"
                )
            now = seen.tensor()
            if now is not None and now._version != seen.version:
                raise SavedTensorError(
                    f"asked to replay {self._path!r}, but its {seen.what} has been modified by an "
                    "inplace operation since its forward pass; change buffers and step the "
                    "optimizer after backward, or do not replay this module"
                )

    def freeze_as_then(self, stack: ExitStack) -> None:
        """Let exactly those tensors require gradients that did in the first pass, until it ends."""
        for seen in self._seen:
            tensor, then = seen.tensor(), seen.requires_grad
            if tensor is not None and tensor.requires_grad != then:
                stack.callback(tensor.requires_grad_, not then)
                tensor.requires_grad_(then)


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what forward pre-hooks, which a replay does not run, may have set."""
    if module._forward_pre_hooks:
        yield from ((k, v) for k, v in vars(module).items() if isinstance(v, Tensor))
