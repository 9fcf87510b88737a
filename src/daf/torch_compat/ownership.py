"""Who else holds a tensor: memory that nobody else holds may be written over.

Four counts tell: of the tensor and of its storage in native code (views, numpy
arrays), and of the Python object of either (variables, hooks that kept it). What
they are where nobody else holds it differs between versions of PyTorch, so PyTorch
itself is asked, once.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.torch_compat.autograd_graph import storage_holders, without_torch_function

Holders = tuple[int, int, int, int]


def holders_of(tensor: Tensor) -> Holders:
    """How many hold a tensor and its storage, in native code and in Python."""
    storage = tensor.untyped_storage()
    of_storage = storage_holders(storage._cdata)
    of_tensor: int = tensor._use_count()  # type: ignore[attr-defined]
    return of_tensor, of_storage, sys.getrefcount(tensor), sys.getrefcount(storage)


# --- a gradient that a node of ours was given -----------------------------------------------


class _Probe(torch.autograd.Function):
    """Counts the holders of a gradient that nobody else has, the way a node gets its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Holders]) -> Tensor:
        """A copy."""
        ctx.found = found
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Count."""
        assert gradient is not None
        with without_torch_function():
            ctx.found.append(holders_of(gradient))
            return gradient, None


@cache
def sole_holders() -> Holders:
    """What :func:`holders_of` tells of a gradient that autograd has just made for one node only.

    It must be asked in that node's own ``backward(ctx, gradient)``.
    """
    found: list[Holders] = []
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        (_Probe.apply(x, found) * 2.0).sum().backward()  # type: ignore[no-untyped-call]
    return found[0]


# --- an operator's result that a tuple of ours holds ----------------------------------------


def is_held_by_none_but(group: tuple[Any, ...]) -> bool:
    """Is the first tensor of ``group``, some operator's result, held by that tuple alone?"""
    return _holders_in(group) == _sole_holders_in_tuple()


def _holders_in(group: tuple[Any, ...]) -> Holders:
    return holders_of(group[0])


@cache
def _sole_holders_in_tuple() -> Holders:
    with torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        return _holders_in((leaf * 2.0,))
