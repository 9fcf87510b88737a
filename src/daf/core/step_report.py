"""The report of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's loss, time and memory (bytes, milliseconds).

    ``peak_bytes``: of the process or GPU; ``swapped_bytes`` of them lay in swap at the end.
    ``evicted_bytes``: of codes, under the pool's cap or the budget. ``released_gradients``: stepped
    and freed inside backward. ``overrun_bytes``: what such a step, which cannot be retried, needed
    over the budget. ``budget_bytes``: at its end (None: no budget).

    ``added_variance``: expected from codes, beside the batch's own ``batch_variance``: squared
    lengths of the mean loss's gradient, or of the steps of an optimizer that divides by it (None:
    not measured yet). ``measuring_ms``: spent measuring them after the step. ``rolled_back_to``:
    the run had diverged; the model is as after that many steps, and codes are wider.
    ``gradient_norm``: before it was clipped (None: it was not asked for).
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
    swapped_bytes: int = 0
    gradient_norm: float | None = None

    @property
    def charged_peak_bytes(self) -> int:
        """The peak, or the budget and what was needed over it, where that is more."""
        if self.budget_bytes is None or not self.overrun_bytes:
            return self.peak_bytes
        return max(self.peak_bytes, self.budget_bytes + self.overrun_bytes)

    @property
    def added_noise(self) -> float | None:
        """The codes' variance relative to the batch's own, which ``tolerance`` bounds."""
        if self.added_variance is None or not self.batch_variance:
            return None
        return self.added_variance / self.batch_variance
