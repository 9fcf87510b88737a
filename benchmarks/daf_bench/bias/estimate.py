"""Is the gradient under codes right on average? The squared bias beside the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from daf.capture.capture import Capture
from daf.core.policy import Policy, plain_policy
from daf.sensitivity.gradient_passes import BUCKETS, Passes
from daf.step.microbatch import LossFunction
from daf.step.state_snapshot import preserved_state


@dataclass(frozen=True, slots=True)
class Bias:
    """Squared lengths, of the gradient of the batch's mean loss.

    ``squared_bias`` is an unbiased estimate, which may be negative; where there is no bias it
    scatters by ``standard_error`` around 0. ``variance`` is that of one pass.
    """

    squared_bias: float
    standard_error: float
    variance: float
    gradient_energy: float

    @property
    def deviations(self) -> float:
        """How many standard errors the squared bias is above 0; above 3 there is one."""
        return self.squared_bias / self.standard_error if self.standard_error else 0.0


def measure_bias(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    policy: Policy,
    *,
    draws: int = 32,
    buckets: int = BUCKETS,
) -> Bias:
    """Compare the mean of ``draws`` passes with the plain gradient; nothing is changed.

    The passes are halved: errors of two independent halves are multiplied, which cancels
    their noise on average (the cross-validated estimate of a squared distance).

    Args:
        model: as it is trained.
        loss_fn: as a session's.
        batch: any nest of tensors.
        policy: whose codes are tested.
        draws: passes, an even number of at least 4.
        buckets: numbers per parameter that gradients are sketched in.
    """
    if draws < 4 or draws % 2:
        raise ValueError(f"asked for {draws} draws; give an even number of at least 4")
    with preserved_state(model) as snapshot:
        passes = Passes(
            model, loss_fn, Capture(model), seed=0, step_index=0, snapshot=snapshot, buckets=buckets
        )
        exact = passes.sketch(batch, plain_policy())
        passes.sketch(batch, policy)
        sites = [report.site for report in passes.capture.sites()]
        errors = torch.stack(
            [
                passes.sketch(batch, policy, dict.fromkeys(sites, draw)) - exact
                for draw in range(1, draws + 1)
            ]
        )
    first, second = errors[: draws // 2].mean(0), errors[draws // 2 :].mean(0)
    per_bucket = first * second
    variance = errors.var(0)
    # Of a product of two independent means without bias, summed over buckets.
    scatter = (variance / (draws // 2)).square().sum().sqrt()
    return Bias(
        float(per_bucket.sum()), float(scatter), float(variance.sum()), float(exact.square().sum())
    )
