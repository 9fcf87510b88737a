"""Convolutions and linear layers whose backward goes through the batch a chunk at a time.

Last, the registry's entry of all operators that do.
"""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.core.policy import CHUNKED
from daf.operators.chunked import attention, products, weight_gradient
from daf.operators.chunked.weight_gradient import ChunkedProduct
from daf.operators.fused_function import Gradients
from daf.operators.protocol import FusedOperator, OperatorCall


class ChunkedConvolution(ChunkedProduct):
    """The autograd function of a chunked convolution."""


class ChunkedLinear(ChunkedProduct):
    """The autograd function of a chunked linear layer."""


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
    ) -> Gradients:
        """Return the gradients of input, weight and bias."""
        bias_shape = [weight.shape[0]] if needs[2] else None
        geometry = (self.stride, self.padding, self.dilation, False, [0, 0], self.groups)
        found: Gradients = torch.ops.aten.convolution_backward(
            gradient, x, weight, bias_shape, *geometry, list(needs)
        )
        return found


class Linear:
    """``x`` (batch, ..., in) times ``weight`` (out, in), transposed."""

    forward = staticmethod(F.linear)

    @staticmethod
    def backward(gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """Return the gradients of input, weight and bias."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = gradient.matmul(weight) if needs[0] else None
        of_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if needs[1] else None
        return of_x, of_weight, rows.sum(0) if needs[2] else None


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
    """Return ``torch.conv2d`` for calls of which ``chunked_product`` returned this."""
    convolution = Convolution(_pair(stride), _pair(padding), _pair(dilation), groups)
    result: Tensor = ChunkedConvolution.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, convolution, chunk_bytes
    )
    return result


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, chunk_bytes: int | None = None
) -> Tensor:
    """Return ``F.linear`` for calls of which ``chunked_product`` returned this."""
    result: Tensor = ChunkedLinear.apply(x, weight, bias, Linear(), chunk_bytes)  # type: ignore[no-untyped-call]
    return result


def chunked_product(
    call: OperatorCall, pack: Callable[..., Any], chunk_bytes: int | None
) -> Callable[..., Tensor] | None:
    """Return ``conv2d`` or ``linear``; None unless the input is several chunks, of a known kind."""
    if call.function not in (torch.conv2d, F.linear) or len(call.arguments) < 2:
        return None
    x, weight, *rest = call.arguments
    bias = rest[0] if rest else call.keywords.get("bias")
    if not weight_gradient.is_chunkable(x, weight, bias, pack, chunk_bytes):
        return None
    if call.function is F.linear:
        is_known = x.dim() >= 2 and weight.dim() == 2 and x.is_contiguous()
        return linear if is_known and not call.keywords.keys() - {"bias"} else None
    has_name = "padding" in call.keywords or any(isinstance(value, str) for value in rest)
    return conv2d if x.dim() == 4 and not has_name else None


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


class ChunkedOperators(FusedOperator):
    """Operators whose input is several chunks of the policy's ``chunk_bytes``."""

    name = CHUNKED
    functions = frozenset(
        {torch.conv2d, F.linear, F.scaled_dot_product_attention, F.multi_head_attention_forward}
    )

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        pack, chunk_bytes = self.context.hooks.hook, self.context.policy.chunk_bytes
        chosen = products.chunked_product(call, pack, chunk_bytes)
        if chosen is None and attention.is_chunkable(call, pack, chunk_bytes):
            chosen = attention.attention
        if chosen is not None:
            if chunk_bytes is not None:  # with chunks of that size, by the same name
                chosen = update_wrapper(partial(chosen, chunk_bytes=chunk_bytes), chosen)
        elif attention.is_many_headed(call):
            chosen = attention.multi_head_attention(pack, chunk_bytes)
        else:
            return None
        return partial(self.context.hooks.run, chosen, call.arguments, call.keywords)
