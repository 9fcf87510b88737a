"""The geometry of a tensor, which a decoder restores around the content."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Shape, stride (elements), dtype and device of a dense tensor that begins its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return a tensor of this geometry; content undefined and, if large, not yet paged in."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def layout_of(tensor: Tensor) -> Layout:
    """Return the geometry of a strided tensor."""
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one unbroken run of memory, each place once, in any permutation."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def content_key(tensor: Tensor, version: int) -> tuple[Any, ...]:
    """Return a key of dense content in memory order, of any shape, at its saved ``version``."""
    geometry = () if is_dense(tensor) else (tuple(tensor.shape), tensor.stride())
    return (tensor.storage_offset(), tensor.numel(), tensor.dtype, version, geometry)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory as (elements,), detached from its graph."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())


def overlaps(tensor: Tensor) -> bool:
    """True if two elements may share a place in memory; like PyTorch's check, errs towards True."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
