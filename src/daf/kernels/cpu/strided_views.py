"""Sizes and strides of elements that do not lie one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from daf.kernels import StridedView

VIEW_DIMENSIONS = 6


def in_memory_order(sizes: Sequence[int], strides: Sequence[int]) -> StridedView:
    """The view whose row-major order is the tensor's memory order.

    Dimensions go by descending distance of neighbours, ties in their given
    order: for a tensor that is dense in some order of its dimensions, this is
    the order in which its elements lie, as every codec takes them.
    """
    order = sorted(range(len(sizes)), key=lambda place: -abs(strides[place]))
    return StridedView(tuple(sizes[k] for k in order), tuple(strides[k] for k in order))


def merged(view: StridedView) -> StridedView:
    """The same elements in the same order, in as few dimensions as can be, and at least one."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    return StridedView(tuple(sizes) or (1,), tuple(strides) or (1,))
