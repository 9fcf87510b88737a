"""Linear layer whose backward goes through the batch a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from daf.operators.chunked import weight_gradient
from daf.operators.chunked.weight_gradient import ChunkedProduct
from daf.operators.protocol import OperatorCall


class ChunkedLinear(ChunkedProduct):
    """The autograd function of a chunked linear layer."""


class _Linear:
    """``x`` (batch, ..., in) times ``weight`` (out, in), transposed."""

    forward = staticmethod(F.linear)

    @staticmethod
    def backward(
        gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = gradient.matmul(weight) if needs[0] else None
        of_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if needs[1] else None
        return of_x, of_weight, rows.sum(0) if needs[2] else None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, chunk_bytes: int | None = None
) -> Tensor:
    """Return ``F.linear`` for calls that passed ``is_chunkable``."""
    result: Tensor = ChunkedLinear.apply(x, weight, bias, _Linear(), chunk_bytes)  # type: ignore[no-untyped-call]
    return result


def is_chunkable(
    call: OperatorCall, pack: Callable[..., Any], chunk_bytes: int | None = None
) -> bool:
    """True if this is a call of ``F.linear`` whose input is several chunks, of a known kind."""
    if call.function is not F.linear or len(call.arguments) < 2 or call.keywords.keys() - {"bias"}:
        return False
    x, weight, *rest = call.arguments
    bias = rest[0] if rest else call.keywords.get("bias")
    return (
        weight_gradient.is_chunkable(x, weight, bias, pack, chunk_bytes)
        and x.dim() >= 2
        and weight.dim() == 2
        and x.is_contiguous()
    )
