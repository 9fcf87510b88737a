"""A session's noise: plans by measured sensitivities, and records what codes add.

When ``SensitivityTracker`` has new numbers, the session plans anew and adds a ``NoiseRecord``.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from daf.capture.capture import Capture
from daf.core.code_errors import error_growth, relative_error
from daf.core.code_format import BLOCK_ELEMENTS, header_bytes, plane_bytes
from daf.core.plan import Plan
from daf.core.policy import Method, Policy, Site
from daf.core.profile import Profiles
from daf.core.reports import SiteReport
from daf.planning.bit_widths import is_lossy, one_bit_wider
from daf.planning.noise import expected_noise
from daf.planning.planner import DEFAULT_TOLERANCE
from daf.profiling.beside_memory import BesideMemory
from daf.sensitivity.result import SQUARED_BIAS
from daf.sensitivity.tracker import Room, SensitivityTracker
from daf.session.plan_selector import PlanSelector
from daf.step.context import StepContext

# One bit less adds four times the noise.
NOISE_OF_A_BIT = 4.0
LEAST_TOLERANCE = 1e-6


class Response(StrEnum):
    """The response to too much noise."""

    WIDENED = "widened"
    NO_ROOM = "no room"  # the budget allows no more bits


@dataclass(frozen=True, slots=True)
class NoiseRecord:
    """One measurement's noise: squared lengths of errors of gradients or steps.

    ``squared_bias``: what of the codes' errors does not average out, over the gradient's square;
    counted apart, as no tolerance makes it less (None: not measured).
    """

    step: int
    added_variance: float
    batch_variance: float
    tolerance: float  # the bound of the noise, relative to the batch's
    response: Response | None = None  # None unless the noise exceeds it, or codes are biased
    squared_bias: float | None = None
    squared_bias_error: float = 0.0  # its standard error

    @property
    def relative_noise(self) -> float:
        """Added over the batch's own noise; infinite if only the batch's own is 0."""
        if self.batch_variance > 0.0:
            return self.added_variance / self.batch_variance
        return math.inf if self.added_variance > 0.0 else 0.0

    @property
    def exceeds(self) -> bool:
        """True if the relative noise is above the tolerance, or not a number."""
        return not self.relative_noise <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a line of JSON."""
        return asdict(self) | {"relative_noise": self.relative_noise}


@dataclass(eq=False)
class NoiseController:
    """One session's noise; an ``asked_tolerance`` of None is the default."""

    tracker: SensitivityTracker
    selector: PlanSelector
    capture: Capture
    asked_tolerance: float | None
    beside: BesideMemory

    def __post_init__(self) -> None:
        # Called once, when there is too much noise and no room for more bits.
        self.tell: Callable[[str], None] = logging.getLogger("daf").warning
        self.history: list[NoiseRecord] = []
        asked = self.asked_tolerance
        self.tolerance = DEFAULT_TOLERANCE if asked is None else asked
        self._has_warned = False
        self._searched_ms = 0.0  # counted so far
        self._by_site: dict[Site, float] = {}
        self._valid_for: tuple[object, ...] = (None, None, None)

    @property
    def by_site(self) -> dict[Site, float]:
        """Noise of each site's code over the batch's own, in the last step; largest first."""
        return dict(sorted(self._by_site.items(), key=lambda each: -each[1]))

    def weigh(
        self, profiles: Profiles, plan: Plan, context: StepContext, budget_bytes: int
    ) -> Profiles:
        """Return the profiles ``weighed``, after measuring if the plan is lossy and that fits."""
        if self.tracker.sensitivity is None and plan.added_noise > 0.0:
            self.beside.begin()
            resident = self.beside.resident_bytes()
            room = Room(profiles.own, profiles.of(plan), budget_bytes)
            first, pool_bytes = replace(context, index=0), self.capture.pool_bytes
            self.tracker.measure(first, room, plan.policy, pool_bytes=pool_bytes)
            # Measuring leaves small blocks in the allocator, and reads more code than steps did.
            self.beside.note()
            profiles = profiles.beside(max(0, self.beside.resident_bytes() - resident))
        return self.weighed(profiles)

    def weighed(self, profiles: Profiles) -> Profiles:
        """Return the profiles with known sensitivities; raises DataError for another model's."""
        self.tracker.check(profiles.every)
        return profiles.changed(self.tracker.weighed)

    def with_weights(self, policy: Policy) -> Policy:
        """Weight a policy that no planner made, so that the least harmful planes are evicted."""
        found = self.tracker.sensitivity
        return policy if found is None else replace(policy, weights=found.weights())

    def widen(self, budget_bytes: int | None) -> bool:
        """Widen codes by at least one bit; False if the budget has no room for that."""
        if (plan := self.selector.plan) is None:
            return False
        if self.selector.profiles is None or budget_bytes is None:
            wider = one_bit_wider(plan.policy)
            self.selector.change_policy(wider)
            return wider != plan.policy
        noise = max(plan.added_noise, plan.bounded_noise)
        return self.selector.widen(noise / NOISE_OF_A_BIT, budget_bytes)

    def after_step(
        self, context: StepContext, running: Plan, step_ms: float, budget_bytes: int | None
    ) -> dict[str, float | None]:
        """Count a step's noise; measure if that is due, then plan anew if there is a budget.

        Returns the ``StepReport``'s fields on noise and on the time to measure it.
        """
        schedule = self.tracker.schedule
        schedule.trained_ms += step_ms
        # Searches by new sensitivities count as measuring; the first plan's search is free.
        ended_ms = self.selector.reweighed_ms
        schedule.planned_ms += ended_ms - self._searched_ms
        self._searched_ms = ended_ms
        before_ms = schedule.measured_ms
        if is_lossy(running.policy) and self.tracker.is_due(context.info.examples, step_ms):
            self._measure(context, running, budget_bytes)
        measured: dict[str, float | None] = {"measuring_ms": schedule.measured_ms - before_ms}
        self._count(running)
        found = self.tracker.sensitivity
        own = None if found is None else found.variance_of(context.info.examples)
        if not own:
            return measured
        measured |= {"added_variance": own * self._relative_noise(), "batch_variance": own}
        return measured | {"squared_bias": found.squared_bias if found else None}

    def _measure(self, context: StepContext, running: Plan, budget_bytes: int | None) -> None:
        room, profiles = None, self.selector.profiles
        if profiles is not None and budget_bytes is not None:
            room = Room(profiles.own, profiles.of(running), self.selector.modelled(budget_bytes))
        ran, pool_bytes = running.policy, self.capture.pool_bytes
        policy = None if room else ran
        if not self.tracker.measure(context, room, ran, policy=policy, pool_bytes=pool_bytes):
            return
        has_widened = False
        if room is not None and budget_bytes is not None:
            has_widened = self._replan(running, budget_bytes)
            found = self.tracker.sensitivity
            if not has_widened and found is not None and found.is_biased:
                has_widened = self.widen(budget_bytes)
        elif self.selector.plan is not None:
            self.selector.change_policy(self.with_weights(running.policy))
        self._count(running)
        self._record(context.index, has_widened=has_widened)

    def _replan(self, running: Plan, budget_bytes: int) -> bool:
        """Plan by new numbers; True if the plan adds less noise than the running one."""
        start_s = time.perf_counter()
        assert self.selector.profiles is not None
        profiles = self.weighed(self.selector.profiles)
        noise = expected_noise(profiles.of(running), running.policy, running.micro_batch)
        self.selector.reweigh(profiles, budget_bytes)
        self.tracker.schedule.planned_ms += 1000.0 * (time.perf_counter() - start_s)
        self.tracker.schedule.plans += 1
        plan = self.selector.plan
        return plan is not None and plan.added_noise < sum(noise.values())

    def _record(self, index: int, *, has_widened: bool) -> None:
        """Append one record per step; after a rollback, steps already recorded are skipped."""
        found = self.tracker.sensitivity
        is_old = bool(self.history) and index <= self.history[-1].step
        if found is None or not found.batch_variance or self.tolerance == 0.0 or is_old:
            return
        own, tolerance = found.batch_variance, max(self.tolerance, LEAST_TOLERANCE)
        bias, error = found.squared_bias, found.squared_bias_error
        record = NoiseRecord(index, self._relative_noise() * own, own, tolerance, None, bias, error)
        if record.exceeds or found.is_biased:
            record = replace(record, response=Response.WIDENED if has_widened else Response.NO_ROOM)
        self.history.append(record)
        if record.response is Response.NO_ROOM and not self._has_warned:
            self._has_warned = True
            self.tell(_too_much(record))

    def _count(self, running: Plan) -> None:
        """Predict each site's noise anew if the plan, sensitivities or profile changed."""
        found, profiles = self.tracker.sensitivity, self.selector.profiles
        key = (running, found, profiles)
        if all(one is other for one, other in zip(key, self._valid_for, strict=True)):
            return
        self._valid_for = key
        if found is None or not found.batch_variance:
            self._by_site = {}
        elif profiles is not None:
            profile = profiles.of(running)
            self._by_site = expected_noise(profile, running.policy, running.micro_batch)
        else:
            own = found.batch_variance
            self._by_site = {
                each.site: found.sites[each.site].at_least * relative_error(each.treatment) / own
                for each in self.capture.sites()
                if each.site in found.sites
            }

    def _relative_noise(self) -> float:
        noise = sum(self._by_site.values())
        if not self.capture.stats.evicted_bytes:
            return noise
        return noise + sum(
            self._by_site.get(each.site, 0.0) * (_growth(each) - 1.0)
            for each in self.capture.sites()
            if each.evicted_bytes
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs (JSON-able), without the plan selector's tolerances."""
        return {"tracker": self.tracker.state_dict(), "is_told": self._has_warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.tracker.load_state_dict(state["tracker"])
        self._has_warned = state["is_told"]


def _too_much(record: NoiseRecord) -> str:
    found = (
        f"codes add {record.relative_noise:.2f} of the batch's own gradient noise, and "
        f"{record.tolerance:.2f} were asked for at most"
    )
    if not record.exceeds:
        found = (
            f"{record.squared_bias:.4f} of the gradient's square are errors of codes that do not "
            f"average out, and at most {SQUARED_BIAS} should be"
        )
    return (
        f"at step {record.step} {found}; training goes on, because there is no room for more bits: "
        "raise the budget, the bits or the batch if the loss suffers"
    )


def _growth(report: SiteReport) -> float:
    """Return the factor by which evicting some of its planes has grown a code's error."""
    bits = report.treatment.bits
    if report.treatment.method is not Method.ROTATED or bits < 1:
        return 1.0
    block = plane_bytes(BLOCK_ELEMENTS, 1)
    blocks = report.held_bytes / (header_bytes(BLOCK_ELEMENTS) + bits * block)
    return error_growth(bits, report.evicted_bytes / (blocks * block))
