"""The report of one training step."""

from dataclasses import dataclass

from daf.core.notebook import Part, card, facts, memory_bar
from daf.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's loss, time and memory (bytes, milliseconds).

    ``peak_bytes``: of the process or GPU; ``swapped_bytes`` of them lay in swap at the end.
    ``evicted_bytes``: of codes, under the pool's cap or the budget. ``released_gradients``: stepped
    and freed inside backward. ``overrun_bytes``: what such a step, which cannot be retried, needed
    over the budget. ``overdraft_bytes``: served beyond the limit, in refused attempts too,
    to callers that cannot bear a refusal. ``budget_bytes``: at its end (None: no budget).

    ``added_variance``: expected from codes, beside the batch's own ``batch_variance``: squared
    lengths of the mean loss's gradient, or of the steps of an optimizer that divides by it (None:
    not measured yet). ``squared_bias``: what of codes' errors does not average out, over the
    gradient's square, as last measured; perhaps below 0. ``measuring_ms``: spent measuring them
    after the step. ``rolled_back_to``: the run had diverged; the model is as after that many steps,
    and codes are wider. ``gradient_norm``: before it was clipped (None: it was not asked for).
    """

    loss: float
    step_ms: float
    peak_bytes: int
    saved_bytes: int
    micro_batch: int
    evicted_bytes: int = 0
    released_gradients: int = 0
    overrun_bytes: int = 0
    overdraft_bytes: int = 0
    budget_bytes: int | None = None
    added_variance: float | None = None
    batch_variance: float | None = None
    measuring_ms: float = 0.0
    rolled_back_to: int | None = None
    swapped_bytes: int = 0
    gradient_norm: float | None = None
    squared_bias: float | None = None

    @property
    def charged_peak_bytes(self) -> int:
        """The peak, or the budget and what was needed over it, where that is more."""
        over_bytes = self.overrun_bytes and (self.budget_bytes or 0) + self.overrun_bytes
        return max(self.peak_bytes, over_bytes)

    @property
    def added_noise(self) -> float | None:
        """The codes' variance relative to the batch's own, which ``tolerance`` bounds."""
        if self.added_variance is None or not self.batch_variance:
            return None
        return self.added_variance / self.batch_variance

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the peak beside the budget, and what was done."""
        noise, bias, norm = self.added_noise, self.squared_bias, self.gradient_norm
        known = {
            "loss": f"{self.loss:.6g}",
            "time": f"{self.step_ms:.1f} ms",
            "micro-batch": self.micro_batch,
            "evicted codes": format_bytes(self.evicted_bytes) if self.evicted_bytes else None,
            "over the budget": format_bytes(self.overrun_bytes) if self.overrun_bytes else None,
            "overdrafts": format_bytes(self.overdraft_bytes) if self.overdraft_bytes else None,
            "noise added by codes": None if noise is None else f"{noise:.2%} of the batch's own",
            "their squared bias": None if bias is None else f"{bias:.2%} of the gradient's square",
            "gradient norm": None if norm is None else f"{norm:.4g}",
            "rolled back to step": self.rolled_back_to,
        }
        saved = min(self.saved_bytes, self.peak_bytes)
        parts = [Part("peak, other", self.peak_bytes - saved), Part("saved for backward", saved)]
        return card("Step", memory_bar(parts, self.budget_bytes), facts(known))
