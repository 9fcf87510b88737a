"""Repeated forward and backward passes of one batch under chosen seeds, changing nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import NonFiniteLossError
from daf.core.policy import Policy, Site
from daf.sensitivity.gradient_sketch import BUCKETS, GradientSketcher
from daf.step.batch_cut import BatchCut
from daf.step.microbatch import LossFunction, likely_cut, read_loss
from daf.step.state_snapshot import StateSnapshot

Around = Callable[[], Any]


@dataclass(eq=False)
class Passes:
    """Passes from the random state of ``snapshot``; they overwrite the account of ``capture``."""

    model: nn.Module
    loss_fn: LossFunction
    capture: Capture
    seed: int  # with ``step_index``, determines the codes' ordinary seeds
    step_index: int
    snapshot: StateSnapshot
    cut: BatchCut | None = None  # how batches are cut; None: the likeliest way
    buckets: int = BUCKETS  # of each parameter's sketch
    examples: int = 0  # of all passes so far

    def __post_init__(self) -> None:
        trained = {id(each): each for each in self.model.parameters() if each.requires_grad}
        self.sketcher = GradientSketcher(tuple(trained.values()), self.buckets)

    def sketch(
        self,
        batch: Any,
        policy: Policy,
        draws: Mapping[Site, int] | None = None,
        around: Around = nullcontext,
        elements: Tensor | None = None,
    ) -> Tensor:
        """Return (parameters, buckets), the sketched gradient; raises NonFiniteLossError.

        ``elements``: (parameters,), receives how many elements of each have a gradient.
        """
        self.snapshot.restore_random()
        examples = (self.cut or likely_cut(batch)).size(batch)
        self.examples += examples
        step = self.capture.step(policy, self.seed, self.step_index, batch=batch, draws=draws or {})
        with torch.enable_grad():
            with around(), step:
                loss = read_loss(self.loss_fn(self.model, batch), examples).mean
            if not bool(torch.isfinite(loss)):
                raise NonFiniteLossError(
                    f"asked to measure sensitivities, but the loss is {loss.item()}; measure on "
                    "a batch and parameters whose loss is finite"
                )
            return self.sketcher.gradient_sketch(loss, elements)
