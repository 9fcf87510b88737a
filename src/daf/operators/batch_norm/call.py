"""A call of ``F.batch_norm``, and whether the fused operator computes what it would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.kernels.normalisation import Geometry, RunningStatistics
from daf.operators.batch_norm.function import Norm
from daf.operators.eligibility import (
    autocast_objection,
    autograd_objection,
    has_usual_strides,
    is_plain,
    is_plain_float,
)
from daf.operators.norms.passes import take_statistics
from daf.saved_tensors.norm_inputs import channel_stride


class NormArguments(NamedTuple):
    """What ``F.batch_norm`` is given, in its order."""

    x: Any
    running_mean: Any = None
    running_var: Any = None
    weight: Any = None
    bias: Any = None
    training: Any = False
    momentum: Any = 0.1
    eps: Any = 1e-5

    def geometry(self) -> Geometry:
        """Of an input that passed :func:`objection`."""
        return Geometry(self.x.shape[1], channel_stride(self.x) or 1, self.x.numel())

    def start(self) -> Norm:
        """Take the statistics, and update the running ones."""
        running = None
        if self.running_mean is not None:
            running = RunningStatistics(self.running_mean, self.running_var, self.momentum)
        geometry = self.geometry()
        with torch.no_grad():
            x = self.x.detach()
            found = take_statistics(x, geometry, self.eps, running)
        return Norm(self.x, self.weight, self.bias, found, geometry)


def read_call(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> NormArguments | None:
    """The call's arguments by name; None where they are none of ``F.batch_norm``."""
    names = dict(keywords)
    if "input" in names:
        names["x"] = names.pop("input")
    try:
        return NormArguments(*arguments, **names)
    except TypeError:
        return None


def objection(call: NormArguments, pack: Callable[..., Any], least_bytes: int) -> str:
    """Why this call must stay as it is; empty where the fused operator computes the same."""
    x = call.x
    if call.training is not True:
        return "it does not normalise by the batch's statistics"
    if not is_plain_float(x) or x.dim() < 2:
        return "its input is no float32 tensor, nor on a GPU one of half the width"
    if channel_stride(x) is None or not has_usual_strides(x):
        return "its input lies neither contiguous nor channels-last"
    if x.nbytes < least_bytes:
        return "its input is small"
    if x.numel() // x.shape[1] < 2:
        return "it has one value per channel"
    vectors = (call.weight, call.bias, call.running_mean, call.running_var)
    channels = (x.shape[1],)
    if not all(v is None or is_vector(v, channels, x) for v in vectors):
        return "its parameters or statistics are no contiguous float32 vectors"
    if (call.running_mean is None) != (call.running_var is None):
        return "it has only one of the running statistics"
    if not isinstance(call.momentum, (int, float)) or not isinstance(call.eps, (int, float)):
        return "its momentum or epsilon is no number"
    unsaved = autograd_objection((x, call.weight, call.bias), pack)
    return autocast_objection(x) or unsaved


def is_vector(tensor: Any, shape: tuple[int, ...], x: Tensor) -> bool:
    """A contiguous float32 tensor of this shape where ``x`` is?"""
    fits = is_plain(tensor) and tuple(tensor.shape) == shape and tensor.is_contiguous()
    return fits and tensor.device == x.device
