"""A plan: what one training step does. Immutable; no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from daf.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Plan:
    """What one training step does; made by the planner, carried out by execution.

    ``return_freed_blocks`` asks for the settings of ``memory.keeper``, which hold
    little more than what is alive; without it the system's allocator is left alone.
    ``release_gradients``: every parameter is updated, and its gradient freed, as soon
    as that is whole. ``bound_ms``: no plan within the budget takes less, time and the small price
    of noise together, so it proves how good this one is. ``choices`` gives one line for every
    choice: what was chosen and why. ``account`` holds the terms of the predicted peak (bytes),
    which add up to its ``predicted_peak``. ``added_noise``: the variance that codes are expected to
    add to the gradient, relative to the batch's own; ``bounded_noise``: the most that it may be,
    which a tolerance bounds (codes are counted there with all that may be computed from them).
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
