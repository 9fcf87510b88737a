"""The report of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's loss, time and memory (bytes, milliseconds).

    ``peak_bytes`` is the process's, or the GPU's, peak during the step; ``evicted_bytes`` of
    codes were evicted under the pool's cap or the budget, least important first.
    ``released_gradients`` were stepped and freed inside backward; ``overrun_bytes``
    is what such a step, which cannot be retried, needed beyond the budget to finish.
    ``budget_bytes`` was in force at its end (None: no budget).

    ``added_variance``: what codes are expected to have added to the gradient, beside the batch's
    own ``batch_variance``; both squared lengths, of the gradient of the batch's mean
    loss, or of the steps of an optimizer that divides by it (None: not measured yet).
    ``measuring_ms`` was spent behind the step on measuring them.
    ``rolled_back_to``: the run had diverged, this step changed nothing, and the model is as it was
    after so many steps; the codes are wider now.
    """

    loss: float
    step_ms: float
    peak_bytes: int
    saved_bytes: int
    micro_batch: int
    evicted_bytes: int = 0
    released_gradients: int = 0
    overrun_bytes: int = 0
    budget_bytes: int | None = None
    added_variance: float | None = None
    batch_variance: float | None = None
    measuring_ms: float = 0.0
    rolled_back_to: int | None = None

    @property
    def added_noise(self) -> float | None:
        """The variance that codes added, relative to the batch's own: what ``tolerance`` bounds."""
        if self.added_variance is None or not self.batch_variance:
            return None
        return self.added_variance / self.batch_variance
