"""Two-dimensional convolution whose backward goes through the batch a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.operators.chunked import weight_gradient
from daf.operators.chunked.weight_gradient import ChunkedProduct
from daf.operators.protocol import OperatorCall


class ChunkedConvolution(ChunkedProduct):
    """The autograd function of a chunked convolution."""


class Convolution(NamedTuple):
    """The arguments of ``torch.conv2d`` besides tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result."""
        return torch.conv2d(x, weight, bias, *self)

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
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
    """Return ``torch.conv2d`` for calls that passed ``is_chunkable``."""
    convolution = Convolution(_pair(stride), _pair(padding), _pair(dilation), groups)
    result: Tensor = ChunkedConvolution.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, convolution, chunk_bytes
    )
    return result


def is_chunkable(
    call: OperatorCall, pack: Callable[..., Any], chunk_bytes: int | None = None
) -> bool:
    """True if this is a call of ``torch.conv2d`` whose input is several chunks, of a known kind."""
    if call.function is not torch.conv2d or len(call.arguments) < 2 or "padding" in call.keywords:
        return False
    x, weight, *rest = call.arguments
    bias = rest[0] if rest else call.keywords.get("bias")
    return (
        weight_gradient.is_chunkable(x, weight, bias, pack, chunk_bytes)
        and x.dim() == 4
        and not any(isinstance(value, str) for value in rest)
    )


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))
