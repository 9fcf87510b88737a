"""Linear layer whose backward goes through the batch a chunk at a time.

Second derivatives are refused by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.core.policy import Need
from daf.operators.chunked import weight_gradient
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders


class _Linear:
    """``x`` (batch, ..., in) times ``weight`` (out, in), transposed."""

    @staticmethod
    def backward(
        gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = gradient.matmul(weight) if needs[0] else None
        of_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if needs[1] else None
        return of_x, of_weight, rows.sum(0) if needs[2] else None


class ChunkedLinear(torch.autograd.Function):
    """The operator."""

    daf_needs = (Need.LINEAR, Need.EXACT)  # of what it saves: see rules.name_saves
    reads_only_what_it_saved = True  # see parameter_reads

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_bytes: int | None = None,
    ) -> Tensor:
        """As ``F.linear``."""
        ctx.save_for_backward(x, weight)
        ctx.chunk_bytes = chunk_bytes
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """See :mod:`daf.operators.chunked.weight_gradient`."""
        with without_torch_function():
            owned = holders_of(gradient) == sole_holders()
            needs = ctx.needs_input_grad[:3]
            found = weight_gradient.backward(
                _Linear(),
                gradient,
                lambda: ctx.saved_tensors,
                needs,
                owned=owned,
                chunk_bytes=ctx.chunk_bytes,
            )
            return (*found, None)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, chunk_bytes: int | None = None
) -> Tensor:
    """``F.linear`` for calls that passed :func:`is_chunkable`."""
    result: Tensor = ChunkedLinear.apply(x, weight, bias, chunk_bytes)  # type: ignore[no-untyped-call]
    return result


def is_chunkable(
    operator: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    pack: Callable[..., Any],
    chunk_bytes: int | None = None,
) -> bool:
    """Is this a call of ``F.linear`` whose input is several chunks, of a known kind?"""
    if operator is not F.linear or len(arguments) < 2 or keywords.keys() - {"bias"}:
        return False
    x, weight, *rest = arguments
    bias = rest[0] if rest else keywords.get("bias")
    return (
        weight_gradient.is_chunkable(x, weight, bias, pack, chunk_bytes)
        and x.dim() >= 2
        and weight.dim() == 2
        and x.is_contiguous()
    )
