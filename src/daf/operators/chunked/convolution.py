"""Two-dimensional convolution whose backward goes through the batch a chunk at a time.

Second derivatives are refused by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.core.policy import Need
from daf.operators.chunked import weight_gradient
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders


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
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        chunk_bytes: int | None = None,
    ) -> Tensor:
        """As ``torch.conv2d``."""
        ctx.save_for_backward(x, weight)
        ctx.chunk_bytes = chunk_bytes
        ctx.convolution = convolution
        return convolution.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """See :mod:`daf.operators.chunked.weight_gradient`."""
        with without_torch_function():
            owned = holders_of(gradient) == sole_holders()
            needs = ctx.needs_input_grad[:3]
            found = weight_gradient.backward(
                ctx.convolution,
                gradient,
                lambda: ctx.saved_tensors,
                needs,
                owned=owned,
                chunk_bytes=ctx.chunk_bytes,
            )
            return (*found, None, None)


# --- who calls it ---------------------------------------------------------------------------


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    chunk_bytes: int | None = None,
) -> Tensor:
    """``torch.conv2d`` for calls that passed :func:`is_chunkable`."""
    convolution = Convolution(_pair(stride), _pair(padding), _pair(dilation), groups)
    result: Tensor = ChunkedConvolution.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, convolution, chunk_bytes
    )
    return result


def is_chunkable(
    operator: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    pack: Callable[..., Any],
    chunk_bytes: int | None = None,
) -> bool:
    """Is this a call of ``torch.conv2d`` whose input is several chunks, of a known kind?"""
    if operator is not torch.conv2d or len(arguments) < 2 or "padding" in keywords:
        return False
    x, weight, *rest = arguments
    bias = rest[0] if rest else keywords.get("bias")
    return (
        weight_gradient.is_chunkable(x, weight, bias, pack, chunk_bytes)
        and x.dim() == 4
        and not any(isinstance(value, str) for value in rest)
    )


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))
