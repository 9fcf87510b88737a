"""Calls of ``F.layer_norm`` and ``F.rms_norm``, and whether the operator computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.kernels import RowMoments
from daf.kernels.devices import is_coded_on_device
from daf.operators.eligibility import (
    autocast_objection,
    autograd_objection,
    has_usual_strides,
    is_plain,
    is_vector,
    size_objection,
)
from daf.operators.row_norm.function import RowNorm

# A program there reads eight rows from end to end, and a part is at least 256 rows.
LONGEST_ROW_ON_DEVICE = 1 << 14


class LayerNormArguments(NamedTuple):
    """The arguments of ``F.layer_norm``, in its order."""

    input: Any
    normalized_shape: Any
    weight: Any = None
    bias: Any = None
    eps: Any = 1e-5


class RmsNormArguments(NamedTuple):
    """The arguments of ``F.rms_norm``, in its order."""

    input: Any
    normalized_shape: Any
    weight: Any = None
    eps: Any = None

    @property
    def bias(self) -> None:
        """None: it has none."""


RowNormArguments = LayerNormArguments | RmsNormArguments
SIGNATURES: Mapping[Callable[..., Any], Callable[..., RowNormArguments]] = {
    F.layer_norm: LayerNormArguments,
    F.rms_norm: RmsNormArguments,
}


def row_norm_of(call: RowNormArguments) -> RowNorm:
    """Return what a call that met no ``objection`` computes."""
    epsilon = torch.finfo(call.input.dtype).eps if call.eps is None else call.eps  # as PyTorch
    moments = RowMoments(float(epsilon), isinstance(call, LayerNormArguments))
    return RowNorm(call.input, call.weight, call.bias, math.prod(call.normalized_shape), moments)


def objection(call: RowNormArguments | None, pack: Callable[..., Any]) -> str:
    """Return why this call must stay PyTorch's; empty where the fused operator computes the same.

    ``pack`` is the saved-tensor hook of the step.
    """
    if call is None or not _is_shape(call):
        return "its arguments are odd"
    x = call.input
    if not is_plain(x):
        return "its input is no float32 tensor that there are kernels for"
    if not x.is_contiguous() or not has_usual_strides(x):
        return "its input is not contiguous"
    reason = size_objection(x)
    if reason:
        return reason
    shape = tuple(call.normalized_shape)
    if is_coded_on_device(x) and math.prod(shape) > LONGEST_ROW_ON_DEVICE:
        return "its rows are longer than a GPU's kernels are made for"
    vectors = (call.weight, call.bias)
    if not all(vector is None or is_vector(vector, shape, x) for vector in vectors):
        return "its parameters are no contiguous float32 tensors of a row's shape"
    if not (call.eps is None or (isinstance(call.eps, (int, float)) and call.eps >= 0)):
        return "its epsilon is no number of 0 or more"
    return autocast_objection(x) or autograd_objection((x, *vectors), pack)


def _is_shape(call: RowNormArguments) -> bool:
    """True if the normalised dimensions are the last ones of the input."""
    shape = call.normalized_shape
    if not isinstance(call.input, Tensor) or not isinstance(shape, (tuple, list, torch.Size)):
        return False
    return len(shape) > 0 and tuple(call.input.shape[-len(shape) :]) == tuple(shape)
