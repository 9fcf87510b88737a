"""``F.cross_entropy`` of logits that a model has made, which become their own gradient.

PyTorch holds the logits' log-softmax until backward, and then two gradients of their size beside
it. Here only the logits are held; backward makes their softmax anew, chunk by chunk, and writes the
gradient over them where nobody else holds them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.operators.chunked.cross_entropy import (
    RowLoss,
    loss_to_softmax,
    scale_of,
    softmax_to_gradient,
)
from daf.operators.fused_function import differentiable_gradients
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.ownership import is_held_by_none_but

_CHUNK_ELEMENTS = 2**18  # a megabyte of float32, which stays in a core's cache over its operators


def logits_cross_entropy(logits: Tensor, target: Tensor, loss: RowLoss) -> Tensor:
    """Cross-entropy of logits against classes, equal to PyTorch's up to the order of sums.

    Args:
        logits: [rows, classes] of float32 or bfloat16; held, and written over in backward unless
            somebody else holds them or the graph is kept.
        target: [rows] class indices of int64 or int32, or ``ignore_index``.
        loss: what is asked for.

    Returns:
        A scalar of float32.

    Raises:
        IndexError: a target is no class, as PyTorch has it.
    """
    found: Tensor = _LogitsCrossEntropy.apply(logits, target, loss)  # type: ignore[no-untyped-call]
    return found


def _plain(logits: Tensor, target: Tensor, loss: RowLoss) -> Tensor:
    return F.cross_entropy(logits.float(), target.long(), **loss._asdict())


class _LogitsCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, loss: RowLoss) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.loss = loss
        summed = loss._replace(reduction="sum")
        with without_torch_function():
            size = _rows_in_chunk(logits)
            parts = zip(torch.split(logits, size), torch.split(target, size), strict=True)
            total = torch.stack([_plain(*part, summed) for part in parts]).sum()
            return _scale_of(target, loss) * total

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        with without_torch_function():
            logits, target = ctx.saved_tensors
            if torch.is_grad_enabled():
                run = partial(_plain, target=target, loss=ctx.loss)
                needs = ctx.needs_input_grad[:1]
                return (*differentiable_gradients(run, (logits,), needs, incoming), None, None)
            group = (logits,)
            del logits
            ctx.maybe_clear_saved_tensors()  # a graph that is kept holds them on
            owned = group[0].is_contiguous() and is_held_by_none_but(group)
            rows = group[0].detach()
            found = rows if owned else torch.empty_like(rows)
            _write_gradient(rows, found, target, ctx.loss, incoming)
            return found, None, None


def _write_gradient(
    rows: Tensor, out: Tensor, target: Tensor, loss: RowLoss, incoming: Tensor
) -> None:
    """Write the gradient of logits to ``out``, which may be the logits themselves."""
    counted, size = target != loss.ignore_index, _rows_in_chunk(rows)
    scale = _scale_of(target, loss).nan_to_num() * incoming
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        part = out[chunk]
        if out.dtype != torch.float32:
            part = rows[chunk].float()
        elif out is not rows:
            part.copy_(rows[chunk])
        loss_to_softmax(part, target[chunk], counted[chunk], loss.label_smoothing)
        softmax_to_gradient(part, target[chunk], counted[chunk], loss.label_smoothing, scale)
        if out.dtype != torch.float32:
            out[chunk].copy_(part)


def _rows_in_chunk(rows: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // rows.shape[1])


def _scale_of(target: Tensor, loss: RowLoss) -> Tensor:
    return scale_of(target != loss.ignore_index, loss.reduction, torch.float32)
