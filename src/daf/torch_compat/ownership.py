"""Whether anybody else holds a tensor; else its memory may be written over.

Four reference counts: of the tensor and its storage, in native code (views, NumPy arrays) and in
Python (variables, hooks). A sole holder's differ between versions of PyTorch: measured once.
"""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from daf.torch_compat.autograd_graph import storage_holders, without_torch_function

Holders = tuple[int, int, int, int]


def holders_of(tensor: Tensor) -> Holders:
    """Return the reference counts of a tensor and its storage, in native code and in Python."""
    storage = tensor.untyped_storage()
    of_storage = storage_holders(storage._cdata)
    of_tensor: int = tensor._use_count()  # type: ignore[attr-defined]
    of_object = sys.getrefcount(tensor) - _references_of(object())
    return of_tensor, of_storage, of_object, sys.getrefcount(storage)


def _references_of(argument: object) -> int:
    """Return what a call holds of its argument: one reference more while Dynamo watches frames."""
    return sys.getrefcount(argument)


class _Probe(torch.autograd.Function):
    """Counts the holders of a gradient that only its node holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Holders]) -> Tensor:
        """Return a copy."""
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Count the gradient's holders."""
        assert gradient is not None
        with without_torch_function():
            ctx.found.append(holders_of(gradient))
            return gradient, None


@cache
def sole_holders() -> Holders:
    """Return ``holders_of`` a gradient for one node only, in its ``backward(ctx, gradient)``."""
    found: list[Holders] = []
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        (_Probe.apply(x, found) * 2.0).sum().backward()  # type: ignore[no-untyped-call]
    return found[0]


def is_held_by_none_but(group: tuple[Any, ...]) -> bool:
    """True if only this tuple holds its first tensor, an operator's result or a view of one."""
    return _holders_in(group) == _sole_holders_in_tuple(is_view=group[0]._is_view())


def _holders_in(group: tuple[Any, ...]) -> list[Holders]:
    base = group[0]._base
    return [holders_of(group[0])] if base is None else [holders_of(group[0]), holders_of(base)]


@cache
def _sole_holders_in_tuple(*, is_view: bool) -> list[Holders]:
    with torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        group = ((leaf * 2.0).view(1) if is_view else leaf * 2.0,)
        return _holders_in(group)
