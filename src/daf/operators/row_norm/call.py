"""Calls of ``F.layer_norm`` and ``F.rms_norm``, and whether the fused operator can stand in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.kernels import RowMoments
from daf.kernels.devices import is_coded_on_device
from daf.operators.batch_norm.call import is_vector
from daf.operators.eligibility import (
    autocast_objection,
    autograd_objection,
    has_usual_strides,
    is_plain,
)
from daf.operators.row_norm.function import RowNorm

# A program there reads eight rows from end to end, and a part is at least 256 rows.
LONGEST_ROW_ON_DEVICE = 1 << 14


class LayerNormArguments(NamedTuple):
    """What ``F.layer_norm`` is given, in its order."""

    x: Any
    normalized_shape: Any
    weight: Any = None
    bias: Any = None
    eps: Any = 1e-5


class RmsNormArguments(NamedTuple):
    """What ``F.rms_norm`` is given, in its order."""

    x: Any
    normalized_shape: Any
    weight: Any = None
    eps: Any = None


RowNormArguments = LayerNormArguments | RmsNormArguments
_KINDS: Mapping[Callable[..., Any], type[RowNormArguments]] = {
    F.layer_norm: LayerNormArguments,
    F.rms_norm: RmsNormArguments,
}
ROW_NORMS = frozenset(_KINDS)


def read_call(
    operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> RowNormArguments | None:
    """The call's arguments by name; None where they are none of the operator."""
    names = dict(keywords)
    if "input" in names:
        names["x"] = names.pop("input")
    try:
        return _KINDS[operator](*arguments, **names)
    except TypeError:
        return None


def row_norm_of(call: RowNormArguments) -> RowNorm:
    """What a call that met no :func:`objection` computes."""
    epsilon = call.eps
    if epsilon is None:
        epsilon = torch.finfo(call.x.dtype).eps  # as PyTorch
    moments = RowMoments(float(epsilon), isinstance(call, LayerNormArguments))
    bias = call.bias if isinstance(call, LayerNormArguments) else None
    return RowNorm(call.x, call.weight, bias, math.prod(call.normalized_shape), moments)


def objection(call: RowNormArguments | None, pack: Callable[..., Any], least_bytes: int) -> str:
    """Why this call must stay as it is; empty where the fused operator computes the same."""
    if call is None or not _is_shape(call):
        return "its arguments are odd"
    x = call.x
    if not is_plain(x):
        return "its input is no float32 tensor that there are kernels for"
    if not x.is_contiguous() or not has_usual_strides(x):
        return "its input is not contiguous"
    if x.nbytes < least_bytes:
        return "its input is small"
    shape = tuple(call.normalized_shape)
    if is_coded_on_device(x) and math.prod(shape) > LONGEST_ROW_ON_DEVICE:
        return "its rows are longer than a GPU's kernels are made for"
    vectors = (call.weight, getattr(call, "bias", None))
    if not all(vector is None or is_vector(vector, shape, x) for vector in vectors):
        return "its parameters are no contiguous float32 tensors of a row's shape"
    if not (call.eps is None or (isinstance(call.eps, (int, float)) and call.eps >= 0)):
        return "its epsilon is no number of 0 or more"
    # A GPU's autocast has these computed in float32, which all of it is already.
    return autocast_objection(x) or autograd_objection((x, *vectors), pack)


def _is_shape(call: RowNormArguments) -> bool:
    """Are the last dimensions of the input those that it is normalised over?"""
    shape = call.normalized_shape
    if not isinstance(call.x, Tensor) or not isinstance(shape, (tuple, list, torch.Size)):
        return False
    return len(shape) > 0 and tuple(call.x.shape[-len(shape) :]) == tuple(shape)
