"""A product with a weight whose backward goes through the batch a chunk at a time."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from daf.codecs.layout import Layout
from daf.codecs.scratch import Scratch
from daf.core.policy import Need
from daf.operators.eligibility import autograd_objection, has_usual_strides, is_plain
from daf.operators.fused_function import Gradients, differentiable_gradients
from daf.saved_tensors.packed_tensor import Kept, Rederived, saves_read_by
from daf.torch_compat.autograd_graph import is_transforming, without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders

CHUNK_BYTES = 8 << 20  # of the input; smaller ones cost convolutions more than they save
# Of a product of less a GPU would have little to do at a time. Never tuned on one.
_DEVICE_CHUNK_BYTES = 64 << 20


def chunk_bytes_on(device: torch.device) -> int:
    """Return the default bytes of a chunk of the input."""
    return CHUNK_BYTES if device.type == "cpu" else _DEVICE_CHUNK_BYTES


class Product(Protocol):
    """An operator that multiplies its input by a weight; the batch is the first dimension."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result."""

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> Gradients:
        """Return the gradients of input, weight and bias."""


class ChunkedProduct(torch.autograd.Function):
    """A product whose backward goes through the batch a chunk at a time.

    A subclass gives the autograd node its name. Where a graph of the gradients is wanted, these are
    PyTorch's own, of the whole input.
    """

    daf_needs = (Need.LINEAR, Need.EXACT)  # of its saves: see ``name_saves``
    reads_only_what_it_saved = True  # see parameter_reads

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        chunk_bytes: int | None,
    ) -> Tensor:
        """Return the product.

        ``chunk_bytes``: of a chunk of the input, kept or not; None: ``chunk_bytes_on`` if coded.
        """
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.chunk_bytes, ctx.has_bias = product, chunk_bytes, bias is not None
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        """Return the gradients, chunk by chunk unless the input comes back whole."""
        with without_torch_function():
            if torch.is_grad_enabled() or is_transforming(gradient):
                return (*_differentiable(ctx, gradient), None, None)
            owned = holders_of(gradient) == sole_holders()
            saved_input, saved_weight = saves_read_by(lambda: ctx.saved_tensors)
            weight, held = saved_weight.restore(Scratch()), saved_input.held
            if isinstance(held, Rederived) or (ctx.chunk_bytes and isinstance(held, Kept)):
                found = _in_chunks(ctx, gradient, held, weight, owned=owned)
            else:
                x, needs = saved_input.restore(Scratch()), ctx.needs_input_grad[:3]
                found = ctx.product.backward(gradient, x, weight, needs)
            return (*found, None, None)


def _differentiable(ctx: Any, gradient: Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    # Its value counts for nothing.
    bias = weight.new_zeros(len(weight)).requires_grad_() if ctx.has_bias else None
    needs = ctx.needs_input_grad[:3]
    return differentiable_gradients(ctx.product.forward, (x, weight, bias), needs, gradient)


def _in_chunks(
    ctx: Any, gradient: Tensor, held: Rederived | Kept, weight: Tensor, *, owned: bool
) -> Gradients:
    needs = ctx.needs_input_grad[:3]
    whole = _room(held.layout, gradient, owned=owned) if needs[0] else None
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    size = ctx.chunk_bytes or chunk_bytes_on(held.layout.device)
    for first, last in chunks_of(held.layout.shape, size):
        x = held.restore_part(first, last)
        of_x, *shares = ctx.product.backward(gradient[first:last], x, weight, needs)
        if whole is not None and of_x is not None:
            whole[first:last].copy_(of_x)
        of_weight, of_bias = _sum(of_weight, shares[0]), _sum(of_bias, shares[1])
    return whole, of_weight, of_bias


def _room(layout: Layout, gradient: Tensor, *, owned: bool) -> Tensor:
    same = layout.shape == tuple(gradient.shape) and layout.stride == gradient.stride()
    return gradient if owned and same and not gradient.is_neg() else layout.empty()


def _sum(before: Tensor | None, share: Tensor | None) -> Tensor | None:
    return share if before is None or share is None else before.add_(share)


def chunks_of(shape: Sequence[int], chunk_bytes: int | None = None) -> list[tuple[int, int]]:
    """Return (first, last) entries of each chunk of a float32 batch, as equal as can be."""
    batch, *entry = shape
    entry_bytes = 4 * torch.Size(entry).numel()
    count = min(batch, -(-batch * entry_bytes // (chunk_bytes or CHUNK_BYTES)))
    return list(pairwise(batch * i // count for i in range(count + 1)))


def is_chunkable(
    x: Any, weight: Any, bias: Any, pack: Callable[..., Any], chunk_bytes: int | None = None
) -> bool:
    """True if the input is several chunks, all are plain, and the weight is trained."""
    is_known = is_plain(x) and is_plain(weight) and (bias is None or is_plain(bias))
    if not is_known or x.nbytes <= (chunk_bytes or chunk_bytes_on(x.device)):
        return False
    is_usual = has_usual_strides(x) and weight.requires_grad
    is_cast = torch.is_autocast_enabled(x.device.type)
    return is_usual and not is_cast and not autograd_objection((x, weight), pack)
