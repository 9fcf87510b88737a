"""The backward pass of a product with a weight, a part of the batch at a time.

PyTorch's own backward wants its whole input, decoded, beside the gradients of
result and input. Here one chunk of the batch is decoded, used for the gradient
of that chunk's input and for its share of the weight's, and forgotten. Shares
are added in the order of the batch: equal to PyTorch's up to the order of
additions. An input that is held as it is (nothing coded) is used whole, bit for
bit as PyTorch does, unless a size of chunks is asked for. The input's gradient
is written over the result's where nobody else holds that and both have the same
geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from daf.codecs.layout import Layout
from daf.codecs.scratch import Scratch
from daf.operators.eligibility import autograd_objection, has_usual_strides, is_plain
from daf.saved_tensors.packed_tensor import Kept, Rederived, all_asked_for

CHUNK_BYTES = 8 << 20  # of the input; smaller ones cost convolutions more than they save
# Of a product of less a GPU would have little to do at a time. Never tuned on one.
_DEVICE_CHUNK_BYTES = 64 << 20


def chunk_bytes_on(device: torch.device) -> int:
    """What a chunk takes where nothing else is asked for."""
    return CHUNK_BYTES if device.type == "cpu" else _DEVICE_CHUNK_BYTES


class Product(Protocol):
    """An operator that multiplies its input by a weight; the batch is the first dimension."""

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias."""


def backward(
    product: Product,
    gradient: Tensor,
    saved_tensors: Callable[[], object],
    needs: Sequence[bool],
    *,
    owned: bool,
    chunk_bytes: int | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias; chunk by chunk, unless the input comes back whole.

    Args:
        product: what to do with a chunk.
        gradient: of the result.
        saved_tensors: reads the node's two saves, input and weight.
        needs: which of the three are asked for.
        owned: nobody else holds ``gradient``, so that it may be written over.
        chunk_bytes: what a chunk of the input may take, of one held as it is too; None:
            :func:`chunk_bytes_on` of a coded one.
    """
    saved_input, saved_weight = all_asked_for(saved_tensors)
    weight, held = saved_weight.restore(Scratch()), saved_input.held
    in_chunks = Rederived if chunk_bytes is None else (Rederived, Kept)
    if not isinstance(held, in_chunks):
        return product.backward(gradient, saved_input.restore(Scratch()), weight, needs)
    whole = _room(held.layout, gradient, owned=owned) if needs[0] else None
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    size = chunk_bytes or chunk_bytes_on(held.layout.device)
    for first, last in chunks_of(held.layout.shape, size):
        x = held.restore_part(first, last)
        of_x, *shares = product.backward(gradient[first:last], x, weight, needs)
        if whole is not None and of_x is not None:
            whole[first:last].copy_(of_x)
        of_weight, of_bias = _sum(of_weight, shares[0]), _sum(of_bias, shares[1])
    return whole, of_weight, of_bias


def _room(layout: Layout, gradient: Tensor, *, owned: bool) -> Tensor:
    """Where the input's gradient goes: a chunk of it is written once the result's was used."""
    same = layout.shape == tuple(gradient.shape) and layout.stride == gradient.stride()
    return gradient if owned and same and not gradient.is_neg() else layout.empty()


def _sum(before: Tensor | None, share: Tensor | None) -> Tensor | None:
    return share if before is None or share is None else before.add_(share)


def chunks_of(shape: Sequence[int], chunk_bytes: int | None = None) -> list[tuple[int, int]]:
    """(first, last) entries of each chunk of a float32 batch, as equal as can be."""
    batch, *entry = shape
    entry_bytes = 4 * torch.Size(entry).numel()
    count = min(batch, -(-batch * entry_bytes // (chunk_bytes or CHUNK_BYTES)))
    borders = [batch * i // count for i in range(count + 1)]
    return list(pairwise(borders))


def is_chunkable(
    x: Any, weight: Any, bias: Any, pack: Callable[..., Any], chunk_bytes: int | None = None
) -> bool:
    """Is the input several chunks, all of a known kind, and is the weight trained?"""
    return (
        is_plain(x)
        and is_plain(weight)
        and (bias is None or is_plain(bias))
        and x.nbytes > (chunk_bytes or chunk_bytes_on(x.device))
        and has_usual_strides(x)
        and weight.requires_grad
        and not torch.is_autocast_enabled(x.device.type)
        and not autograd_objection((x, weight), pack)
    )
