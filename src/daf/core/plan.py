"""The plan of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from daf.core.policy import Policy


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
