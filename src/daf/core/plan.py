"""The plan of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from daf.core.markup import Markup
from daf.core.notebook import card, facts, folded, memory_bar, parts_of
from daf.core.policy import Policy
from daf.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What one training step does; made by the planner, carried out by execution.

    ``return_freed_blocks``: apply the settings of ``memory.process_limit``; False leaves the
    system's allocator alone. ``release_gradients``: update each parameter and free its gradient as
    soon as that is complete. ``bound_ms``: no plan within the budget takes less (time plus the
    small price of noise). ``choices``: one line of explanation per choice. ``account``: terms of
    the predicted peak (bytes), adding up to its ``predicted_peak``. ``added_noise``: the expected
    variance that codes add to the gradient, relative to the batch's own. ``bounded_noise``: its
    upper bound, which ``tolerance`` limits; codes count with all that may be computed from them.
    ``saved_by_moment``: bytes alive for backward at each moment: ``plain`` PyTorch's, ``held`` by
    this plan, and of these what is computed ``again``. ``forward_moments``: how many come first.
    """

    policy: Policy
    micro_batch: int
    predicted_peak_bytes: int
    return_freed_blocks: bool = True
    reason: str = ""
    release_gradients: bool = False
    predicted_step_ms: float = 0.0
    bound_ms: float = 0.0
    choices: tuple[str, ...] = ()
    account: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    added_noise: float = 0.0
    bounded_noise: float = 0.0
    saved_by_moment: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    forward_moments: int = 0

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the account of the peak as a bar, and the choices."""
        step = f"{self.predicted_step_ms:.1f} ms" if self.predicted_step_ms else None
        peak = format_bytes(self.predicted_peak_bytes) if self.predicted_peak_bytes else None
        known = {
            "policy": self.policy.name,
            "micro-batch": self.micro_batch,
            "predicted peak": peak,
            "predicted step": step,
            "noise added by codes": f"{self.added_noise:.2%} of the batch's own",
            "why": self.reason or None,
        }
        choices = folded(f"{len(self.choices)} choices", self.choices)
        bar = memory_bar(parts_of(self.account)) if self.account else Markup()
        return card("Plan", bar, facts(known), choices)
