"""A call of ``F.batch_norm``, and whether the fused operator computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from daf.kernels.normalisation import Geometry, RunningStatistics
from daf.operators.batch_norm.function import Norm
from daf.operators.eligibility import (
    autocast_objection,
    autograd_objection,
    input_objection,
    is_vector,
)
from daf.operators.norms.passes import take_statistics
from daf.saved_tensors.norm_inputs import channel_stride


class NormArguments(NamedTuple):
    """The arguments of ``F.batch_norm``, in its order."""

    input: Any
    running_mean: Any = None
    running_var: Any = None
    weight: Any = None
    bias: Any = None
    training: Any = False
    momentum: Any = 0.1
    eps: Any = 1e-5

    def start(self) -> Norm:
        """Take the statistics, and update the running ones; the call met no ``objection``."""
        x, running = self.input, None
        if self.running_mean is not None:
            running = RunningStatistics(self.running_mean, self.running_var, self.momentum)
        geometry = Geometry(x.shape[1], channel_stride(x) or 1, x.numel())
        with torch.no_grad():
            statistics = take_statistics(x.detach(), geometry, self.eps, running)
        return Norm(x, self.weight, self.bias, statistics, geometry)


def objection(call: NormArguments | None, pack: Callable[..., Any]) -> str:
    """Return why this call must stay PyTorch's; empty where the fused operator computes the same.

    ``pack`` is the saved-tensor hook of the step.
    """
    if call is None:
        return "its arguments are odd"
    if call.training is not True:
        return "it does not normalise by the batch's statistics"
    x = call.input
    reason = input_objection(x)
    if reason:
        return reason
    if x.dim() < 2 or x.numel() // x.shape[1] < 2:
        return "it has one value per channel"
    vectors = (call.weight, call.bias, call.running_mean, call.running_var)
    channels = (x.shape[1],)
    if not all(v is None or is_vector(v, channels, x) for v in vectors):
        return "its parameters or statistics are no contiguous float32 vectors"
    if (call.running_mean is None) != (call.running_var is None):
        return "it has only one of the running statistics"
    if not isinstance(call.momentum, (int, float)) or not isinstance(call.eps, (int, float)):
        return "its momentum or epsilon is no number"
    return autocast_objection(x) or autograd_objection((x, call.weight, call.bias), pack)
