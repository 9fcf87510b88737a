"""Attention with dropout on the CPU, a part of the batch at a time, and run again in backward."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.core.policy import Need
from daf.operators.chunked import weight_gradient
from daf.operators.eligibility import autograd_objection, is_plain
from daf.operators.fused_function import Gradients, differentiable_gradients
from daf.operators.protocol import OperatorCall
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.operator_mode import safe_softmax, softmax_backward, with_globals

# Of a chunk of other operators: with weights of 2 MiB at a time, which stay in a cache, forward and
# backward of 64 x 8 heads of 128 x 128 took 137 ms, with 8 MiB 144, PyTorch's composite 162.
_PARTS = 4
# Of q, k, v, dropout's bits and the mask.
_Chunk = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
_DROPOUT_PLACE = list(signature(F.multi_head_attention_forward).parameters).index("dropout_p")


class AttentionCall(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``, in its order."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False

    @property
    def weights_shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, rows, columns) of attention's weights."""
        batch, heads, rows, _ = self.query.shape
        return batch, heads, rows, self.key.shape[2]


class _Attention(NamedTuple):
    """How scores become weights; ``scale`` multiplies q and k each, ``probability`` drops."""

    scale: float
    probability: float
    is_causal: bool

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return (batch, heads, rows, columns) before dropout, of scaled q and k."""
        scores = q @ k.transpose(-2, -1)
        if self.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores.masked_fill_(~seen, -math.inf)
        elif mask is not None and mask.dtype is torch.bool:
            scores.masked_fill_(~mask, -math.inf)
        elif mask is not None:
            scores += mask
        return safe_softmax(scores, -1)

    def result(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention's result, by operators that autograd differentiates."""
        weights = self.weights(q * self.scale, k * self.scale, mask)
        return (weights * self.noise(kept, weights.dtype)) @ v

    def noise(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factors by which dropout multiplies weights, from its bits."""
        return kept.to(dtype).div_(1 - self.probability)

    def backward(self, gradient: Tensor, chunk: _Chunk, needs: Sequence[bool]) -> Gradients:
        """Return the gradients of a chunk's q, k and v."""
        q, k, v, kept, mask = chunk
        scaled_q, scaled_k = q * self.scale, k * self.scale
        weights = self.weights(scaled_q, scaled_k, mask)
        noise = self.noise(kept, weights.dtype)
        of_v = (weights * noise).transpose(-2, -1) @ gradient if needs[2] else None
        if not (needs[0] or needs[1]):
            return None, None, of_v
        of_weights = (gradient @ v.transpose(-2, -1)).mul_(noise)
        of_scores = softmax_backward(of_weights, weights, -1, weights.dtype)
        of_q = (of_scores @ scaled_k).mul_(self.scale) if needs[0] else None
        of_k = (of_scores.transpose(-2, -1) @ scaled_q).mul_(self.scale) if needs[1] else None
        return of_q, of_k, of_v


class ChunkedAttention(torch.autograd.Function):
    """The autograd function of chunked attention."""

    # Of its saves: see ``name_saves``.
    daf_needs = (Need.SCORE, Need.SCORE, Need.PRODUCT, Need.INTEGER, Need.EXACT)
    reads_only_what_it_saved = True  # see parameter_reads

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        kind: _Attention,
        chunk_bytes: int,
    ) -> Tensor:
        """Return ``F.scaled_dot_product_attention``; a ``mask`` of no elements is none."""
        batch, heads, rows, _ = query.shape
        kept = query.new_empty(batch, heads, rows, key.shape[2], dtype=torch.bool)
        kept.bernoulli_(1 - kind.probability)
        ctx.save_for_backward(query, key, value, kept, mask)
        ctx.kind, ctx.chunk_bytes = kind, chunk_bytes
        ctx.daf_plain_bytes = _composite_bytes(query, key, kept, ctx.needs_input_grad)
        result = query.new_empty(batch, heads, rows, value.shape[3])
        for first, last in _chunks(kept, chunk_bytes):
            q, k, v, bits, seen = _part((query, key, value, kept, mask), first, last)
            weights = kind.weights(q * kind.scale, k * kind.scale, seen)
            weights.mul_(kind.noise(bits, weights.dtype))
            torch.matmul(weights, v, out=result[first:last])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        """Return the gradients; compute the weights again, chunk by chunk."""
        with without_torch_function():
            saved, needs = ctx.saved_tensors, ctx.needs_input_grad[:3]
            if torch.is_grad_enabled():
                *_, kept, mask = _part(saved, 0, len(saved[0]))
                run = partial(ctx.kind.result, kept=kept, mask=mask)
                found = differentiable_gradients(run, saved[:3], needs, gradient)
                return (*found, None, None, None)
            pairs = zip(saved, needs, strict=False)
            found = tuple(torch.empty_like(each) if needed else None for each, needed in pairs)
            for first, last in _chunks(saved[3], ctx.chunk_bytes):
                part = _part(saved, first, last)
                shares = ctx.kind.backward(gradient[first:last], part, needs)
                for whole, share in zip(found, shares, strict=True):
                    if whole is not None and share is not None:
                        whole[first:last] = share
            return (*found, None, None, None)


def _composite_bytes(
    query: Tensor, key: Tensor, kept: Tensor, needs: Sequence[bool]
) -> tuple[int | None, ...]:
    """Return the bytes that PyTorch's composite would make and save in place of each save."""
    # Scaled q and k; v itself; weights before dropout, its noise, and weights after dropout.
    has_scores, element = needs[0] or needs[1], query.element_size()
    weights = element * kept.numel() * (2 * has_scores + needs[2])
    scaled_q, scaled_k = needs[1] * query.nbytes, needs[0] * key.nbytes
    return scaled_q, scaled_k, None if has_scores else 0, weights, 0


def _chunks(kept: Tensor, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return (first, last) entries of the batch whose weights fill a chunk, about equal."""
    return weight_gradient.chunks_of((*kept.shape, _PARTS), chunk_bytes)


def _part(saved: Sequence[Tensor], first: int, last: int) -> _Chunk:
    query, key, value, kept, mask = saved
    is_shared = mask.dim() < 4 or mask.shape[0] == 1
    seen = None if mask.numel() == 0 else mask if is_shared else mask[first:last]
    here = slice(first, last)
    return query[here], key[here], value[here], kept[here], seen


def attention(*arguments: Any, chunk_bytes: int | None = None, **keywords: Any) -> Tensor:
    """Return ``F.scaled_dot_product_attention`` for calls that passed ``is_chunkable``.

    Its name is not PyTorch's, since what it saves is not: sites are named by it.
    """
    call = AttentionCall(*arguments, **keywords)
    scale = 1 / math.sqrt(call.query.shape[3]) if call.scale is None else call.scale
    kind = _Attention(math.sqrt(scale), float(call.dropout_p), bool(call.is_causal))
    mask = call.query.new_empty(0) if call.attn_mask is None else call.attn_mask
    result: Tensor = ChunkedAttention.apply(  # type: ignore[no-untyped-call]
        *call[:3], mask, kind, chunk_bytes or weight_gradient.CHUNK_BYTES
    )
    return result


def multi_head_attention(pack: Callable[..., Any], chunk_bytes: int | None) -> Callable[..., Any]:
    """Return ``F.multi_head_attention_forward`` with chunked attention where that is possible.

    All else in it is PyTorch's own code. Its name is not, since what it saves is not.
    """
    theirs = F.scaled_dot_product_attention

    def attend(*arguments: Any, **keywords: Any) -> Tensor:
        if is_chunkable(OperatorCall(theirs, arguments, keywords), pack, chunk_bytes):
            return attention(*arguments, chunk_bytes=chunk_bytes, **keywords)
        return theirs(*arguments, **keywords)

    return with_globals(
        F.multi_head_attention_forward,
        "multi_head_attention",
        scaled_dot_product_attention=attend,
        has_torch_function=lambda _tensors: False,  # a mode beneath would be given the original
    )


def is_many_headed(call: OperatorCall) -> bool:
    """True if this is ``nn.MultiheadAttention`` with dropout that returns no weights."""
    if call.function is not F.multi_head_attention_forward or len(call.arguments) <= _DROPOUT_PLACE:
        return False
    is_alone = call.keywords.get("need_weights") is False
    return is_alone and bool(call.keywords.get("training")) and call.arguments[_DROPOUT_PLACE] > 0.0


def is_chunkable(
    call: OperatorCall, pack: Callable[..., Any], chunk_bytes: int | None = None
) -> bool:
    """True if this is attention with dropout on the CPU, of a known kind and several chunks."""
    if call.function is not F.scaled_dot_product_attention:
        return False
    known = call.read(AttentionCall)
    return (
        known is not None
        and _is_known(known)
        and 4 * math.prod(known.weights_shape) * _PARTS
        > (chunk_bytes or weight_gradient.CHUNK_BYTES)
        and not torch.is_autocast_enabled("cpu")
        and not autograd_objection(known[:3], pack)
    )


def _is_known(call: AttentionCall) -> bool:
    tensors = call[:3]
    if not all(is_plain(each) and each.dim() == 4 for each in tensors) or call.enable_gqa:
        return False
    if call.query.device.type != "cpu":  # fused kernels of GPUs know dropout
        return False
    query, key, value = tensors
    fits = query.shape[:2] == key.shape[:2] == value.shape[:2] and key.shape[2] == value.shape[2]
    is_dropping = isinstance(call.dropout_p, float) and 0.0 < call.dropout_p < 1.0
    has_scale = call.scale is None or (isinstance(call.scale, (int, float)) and call.scale > 0)
    return fits and query.shape[3] == key.shape[3] and is_dropping and has_scale and _has_mask(call)


def _has_mask(call: AttentionCall) -> bool:
    """True if there is no mask, or one that can be cut with the batch."""
    mask, shape = call.attn_mask, call.weights_shape
    if mask is None:
        return True
    if type(mask) is not Tensor or call.is_causal or not 2 <= mask.dim() <= 4:
        return False
    is_usual = mask.dtype in (torch.bool, torch.float32) and mask.device.type == "cpu"
    fits = all(size in (1, own) for size, own in zip(mask.shape[::-1], shape[::-1], strict=False))
    return is_usual and fits and not mask.requires_grad and mask.numel() > 0
