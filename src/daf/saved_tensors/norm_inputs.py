"""Normalisations seen as per-channel affine maps, so that the normalised value can be coded.

A normalisation computes ``y = (x - mean) * inverse_deviation`` and then
``gamma * y + beta``. Coding y instead of x lets one code serve the
normalisation's own backward and, through gamma and beta, the operators behind
it. Both maps are told in memory order, as :class:`daf.kernels.normalisation.Channels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.codecs.scratch import Scratch
from daf.kernels.normalisation import Channels
from daf.saved_tensors.backward_rules import BATCH_NORMS, saved_in
from daf.saved_tensors.packed_tensor import Kept
from daf.torch_compat.autograd_nodes import saved_value


class Normalisation(NamedTuple):
    """How an operator normalised ``x``, in memory order.

    ``mean`` and ``inverse_deviation`` are (groups,) float32; element i belongs
    to group ``(i // inner) % groups``. ``result`` maps y to the operator's
    result, None where gamma and beta are not known for certain; ``plain``
    says that they are absent.
    """

    mean: Tensor
    inverse_deviation: Tensor
    inner: int
    result: Channels | None
    plain: bool

    def forward(self) -> Channels:
        """x to y."""
        shift = -self.mean * self.inverse_deviation
        return Channels(self.inverse_deviation, shift, self.inner)


def normalisation_of(
    node: Any, x: Tensor, operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Normalisation | None:
    """What a normalisation's node did to its input ``x``; None where that is no such map.

    Must be called while the node's saved statistics are still pending.
    """
    name = node.name()
    mean, inverse_deviation = _statistic(node, "result1"), _statistic(node, "result2")
    if mean is None or inverse_deviation is None or x.dim() < 2:
        return None
    gamma = _statistic(node, "weight")
    channels = x.shape[1]
    if name in BATCH_NORMS and saved_value(node, "training"):
        inner = channel_stride(x)
        if inner is None:
            return None
        known, beta = _bias_argument(operator, arguments, keywords)
        return _assemble(mean, inverse_deviation, inner, gamma, beta, inner, known)
    if not x.is_contiguous():
        return None
    if name == "NativeLayerNormBackward0":
        row = math.prod(saved_value(node, "normalized_shape"))
        beta = _statistic(node, "bias")
        return _assemble(mean, inverse_deviation, row, gamma, beta, 1, True)
    if name == "NativeGroupNormBackward0":
        inner = x.numel() // mean.numel()
        known, beta = _bias_argument(operator, arguments, keywords)
        plane = x.numel() // (x.shape[0] * channels)
        return _assemble(mean, inverse_deviation, inner, gamma, beta, plane, known)
    return None


def _assemble(
    mean: Tensor,
    inverse_deviation: Tensor,
    inner: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    channel_inner: int,
    is_known: bool,
) -> Normalisation:
    result = copied_affine(gamma, beta, channel_inner) if is_known else None
    plain = is_known and result is None
    return Normalisation(_vector(mean), _vector(inverse_deviation), inner, result, plain)


def copied_affine(gamma: Tensor | None, beta: Tensor | None, inner: int) -> Channels | None:
    """Return the affine by gamma and beta, in float32; None where both are None.

    Copies: the optimizer may change the parameters before backward decodes.
    """
    present = gamma if gamma is not None else beta
    if present is None:
        return None
    scale = gamma if gamma is not None else torch.ones_like(present)
    shift = beta if beta is not None else torch.zeros_like(present)
    return Channels(_vector(scale).clone(), _vector(shift).clone(), inner)


def _vector(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).float().contiguous()


def _statistic(node: Any, slot: str) -> Tensor | None:
    saved = saved_in(node, slot)
    if saved is None:
        return None
    # A parameter that the node saved before its input is settled already.
    return saved.held.restore(Scratch()) if isinstance(saved.held, Kept) else saved.tensor


def channel_stride(x: Tensor) -> int | None:
    """Elements between neighbours of the channel dimension in memory; None for odd layouts."""
    if x.is_contiguous():
        return math.prod(x.shape[2:])
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return 1
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return 1
    return None


_BIAS_PLACES = {
    F.batch_norm: 4,
    torch.batch_norm: 2,
    F.group_norm: 3,
    torch.group_norm: 3,
}


def _bias_argument(
    operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[bool, Tensor | None]:
    """Whether beta is known for certain (autograd does not save it), and beta or None."""
    place = _BIAS_PLACES.get(operator)
    if place is None:
        return False, None
    if place < len(arguments):
        return True, arguments[place]
    return True, keywords.get("bias")
