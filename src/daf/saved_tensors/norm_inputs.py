"""Inputs of normalisations, coded as the normalised value.

A normalisation computes ``y = (x - mean) * inverse_deviation`` and then ``gamma * y + beta``: two
affines in memory order. One code of y serves its backward and the operators behind it.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.codecs.codes import Values
from daf.codecs.layout import Layout
from daf.codecs.scratch import Scratch
from daf.kernels.normalisation import Channels, Statistics
from daf.saved_tensors.backward_rules import BATCH_NORMS, saved_in
from daf.saved_tensors.pack_request import Call, PackRequest
from daf.saved_tensors.packed_tensor import Decoded, Kept, Stored
from daf.torch_compat.autograd_graph import saved_value


class Normalisation(NamedTuple):
    """How an operator normalised its input, in memory order."""

    statistics: Statistics  # (groups,) float32; element i is of group ``(i // inner) % groups``
    inner: int
    result: Channels | None  # of y, by gamma and beta; None: they are absent or uncertain
    plain: bool  # they are absent


class NormInput(Decoded):
    """The input of a normalisation, coded as the normalised value; statistics are its own saves."""

    __slots__ = ("_inner", "_statistics")

    def __init__(self, code: Stored[Values], layout: Layout, done: Normalisation) -> None:
        super().__init__(code, layout)
        self._statistics, self._inner = done.statistics, done.inner

    def restore(self, scratch: Scratch) -> Tensor:
        out = scratch.empty(self.layout)
        self.code.content.decode(out, self._statistics.inverse(self._inner))
        return out


def normalisation_of(job: PackRequest) -> Normalisation | None:
    """Return what a normalisation did to its input, its saves being pending; None: no such map."""
    node, x = job.saved.node, job.tensor
    name = node.name()
    mean, inverse_deviation = _statistic(node, "result1"), _statistic(node, "result2")
    if mean is None or inverse_deviation is None or x.dim() < 2:
        return None
    known, beta = _bias_argument(job.call)
    channel_inner: int | None
    if name in BATCH_NORMS and saved_value(node, "training"):
        inner = channel_inner = channel_stride(x)
    elif name == "NativeLayerNormBackward0" and x.is_contiguous():
        inner, channel_inner = math.prod(saved_value(node, "normalized_shape")), 1
        known, beta = True, _statistic(node, "bias")
    elif name == "NativeGroupNormBackward0" and x.is_contiguous():
        inner, channel_inner = x.numel() // mean.numel(), math.prod(x.shape[2:])
    else:
        return None
    if inner is None or channel_inner is None:
        return None
    result = copied_affine(_statistic(node, "weight"), beta, channel_inner) if known else None
    statistics = Statistics(_vector(mean), _vector(inverse_deviation))
    return Normalisation(statistics, inner, result, known and result is None)


def copied_affine(gamma: Tensor | None, beta: Tensor | None, inner: int) -> Channels | None:
    """Return a float32 copy of gamma and beta, which may change before backward; None: neither."""
    present = gamma if gamma is not None else beta
    if present is None:
        return None
    scale = gamma if gamma is not None else torch.ones_like(present)
    shift = beta if beta is not None else torch.zeros_like(present)
    return Channels(_vector(scale).clone(), _vector(shift).clone(), inner)


def _vector(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).float().contiguous()


def _statistic(node: Any, slot: str) -> Tensor | None:
    if (saved := saved_in(node, slot)) is None:
        return None
    # A parameter that the node saved before its input is settled already.
    return saved.held.restore(Scratch()) if isinstance(saved.held, Kept) else saved.tensor


def channel_stride(x: Tensor) -> int | None:
    """Return the elements between neighbours of dimension 1 in memory; None for odd layouts."""
    if x.is_contiguous():
        return math.prod(x.shape[2:])
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return 1 if last is not None and x.is_contiguous(memory_format=last) else None


_BIAS_PLACES = {F.batch_norm: 4, torch.batch_norm: 2, F.group_norm: 3, torch.group_norm: 3}


def _bias_argument(call: Call) -> tuple[bool, Tensor | None]:
    """Return whether beta is known for certain (autograd does not save it), and beta or None."""
    if (place := _BIAS_PLACES.get(call.operator)) is None:
        return False, None
    if place < len(call.arguments):
        return True, call.arguments[place]
    return True, call.keywords.get("bias")
