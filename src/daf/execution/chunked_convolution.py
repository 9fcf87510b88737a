"""Convolution whose backward decodes a few images at a time.

PyTorch's own backward wants its whole input, decoded, beside the gradients of
result and input. Here one chunk of the batch is decoded, used for the gradient
of that chunk's input and for its share of the weight's, and forgotten. Shares
are added in the order of the batch: equal to PyTorch's up to the order of
additions. An input that is held as it is (nothing coded) is used whole. The
input's gradient is written over the result's where nobody else holds that and
both have the same geometry.

Second derivatives are refused by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.execution.held import Rederived, Saved, all_asked_for
from daf.execution.ownership import holders_of, sole_holders
from daf.execution.plain_call import autograd_objection, has_usual_strides, is_plain
from daf.plan import Need
from daf.store.layout import Layout
from daf.store.scratch import Scratch

CHUNK_BYTES = 8 << 20  # of the input; smaller ones cost convolutions more than they save


class Convolution(NamedTuple):
    """What ``torch.conv2d`` is given besides tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result."""
        return torch.conv2d(x, weight, bias, *self)

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias."""
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [weight.shape[0]] if needs[2] else None,
            self.stride,
            self.padding,
            self.dilation,
            False,  # not transposed
            [0, 0],
            self.groups,
            list(needs),
        )
        return found


class ChunkedConvolution(torch.autograd.Function):
    """The operator."""

    daf_needs = (Need.LINEAR, Need.EXACT)  # of what it saves: see rules.name_saves
    reads_only_what_it_saved = True  # see parameter_reads

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution
    ) -> Tensor:
        """As ``torch.conv2d``."""
        ctx.save_for_backward(x, weight)
        ctx.convolution = convolution
        return convolution.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Chunk by chunk, unless the input is held as it is."""
        with torch._C.DisableTorchFunction():
            owned = holders_of(gradient) == sole_holders()
            saved_input, saved_weight = all_asked_for(lambda: ctx.saved_tensors)
            weight = saved_weight.restore(Scratch())
            needs = ctx.needs_input_grad[:3]
            parts = (gradient, saved_input, weight, needs)
            return (*_gradients(ctx.convolution, *parts, owned=owned), None)


def _gradients(
    convolution: Convolution,
    gradient: Tensor,
    saved: Saved,
    weight: Tensor,
    needs: Sequence[bool],
    *,
    owned: bool,
) -> tuple[Tensor | None, ...]:
    held = saved.held
    if not isinstance(held, Rederived):
        return convolution.backward(gradient, saved.restore(Scratch()), weight, needs)
    whole = _room(held.layout, gradient, owned=owned) if needs[0] else None
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    for first, last in chunks_of(held.layout.shape):
        x = held.restore_part(first, last)
        of_x, *shares = convolution.backward(gradient[first:last], x, weight, needs)
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


def chunks_of(shape: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) images of each chunk of a float32 batch, as equal as can be."""
    batch, *image = shape
    image_bytes = 4 * torch.Size(image).numel()
    count = min(batch, -(-batch * image_bytes // CHUNK_BYTES))
    borders = [batch * i // count for i in range(count + 1)]
    return list(pairwise(borders))


# --- who calls it ---------------------------------------------------------------------------


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.conv2d`` for calls that passed :func:`is_chunkable`."""
    convolution = Convolution(_pair(stride), _pair(padding), _pair(dilation), groups)
    result: Tensor = ChunkedConvolution.apply(x, weight, bias, convolution)  # type: ignore[no-untyped-call]
    return result


def substitute(
    pack: Callable[..., Any],
) -> Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Callable[..., Any]]:
    """What an operator mode is to run instead of an operator, where ``pack`` sees what it saves."""
    sole_holders()  # known before the first backward pass asks

    def chosen(
        operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Callable[..., Any]:
        return conv2d if is_chunkable(operator, arguments, keywords, pack) else operator

    return chosen


def is_chunkable(
    operator: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    pack: Callable[..., Any],
) -> bool:
    """Is this a call of ``torch.conv2d`` whose input is several chunks, of a known kind?"""
    if operator is not torch.conv2d or len(arguments) < 2 or "padding" in keywords:
        return False
    x, weight, *rest = arguments
    bias = rest[0] if rest else keywords.get("bias")
    if not all(t is None or is_plain(t) for t in (x, weight, bias)):
        return False
    return (
        x.dim() == 4
        and x.nbytes > CHUNK_BYTES
        and has_usual_strides(x)
        and weight.requires_grad
        and not any(isinstance(value, str) for value in rest)
        and not torch.is_autocast_enabled("cpu")
        and not autograd_objection((x, weight), pack)
    )


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))
