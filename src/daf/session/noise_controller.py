"""What a session does about noise: measures sensitivities, plans by them, watches, and tells.

Between steps, when ``tracker`` has found new numbers, the plan is made anew under them; what
the codes in force add beside the batch's own noise goes to a ``NoiseWatch``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from daf.capture.capture import Capture
from daf.core.code_errors import error_growth, relative_error
from daf.core.code_format import BLOCK_ELEMENTS, header_bytes, plane_bytes
from daf.core.plan import Plan
from daf.core.policy import Method, Policy, Site
from daf.core.reports import SiteReport
from daf.memory.domain import MemoryDomain
from daf.planning.bit_widths import is_lossy, one_bit_wider
from daf.planning.noise import expected_noise
from daf.planning.planner import DEFAULT_TOLERANCE
from daf.sensitivity.monitors import NoiseRecord, NoiseWatch, Response
from daf.session.plan_selector import PlanSelector, Profiles, profile_for
from daf.session.sensitivity_tracker import Room, SensitivityTracker
from daf.step.microbatch import LossFunction, batch_size

# One bit less adds four times the noise.
NOISE_OF_A_BIT = 4.0
LEAST_TOLERANCE = 1e-6


class StepNoise(NamedTuple):
    """Of one step: what codes added and the batch's own, squared lengths of gradient errors.

    None where nothing was measured yet. ``measuring_ms`` was spent on measuring behind it.
    """

    added_variance: float | None = None
    batch_variance: float | None = None
    measuring_ms: float = 0.0


class NoiseController:
    """One session's noise.

    Args:
        tracker: what measures.
        selector: what plans.
        capture: what the session's steps run under.
        tolerance: as the user gave it, None for the default.
        memory: what the budget bounds.
    """

    def __init__(
        self,
        tracker: SensitivityTracker,
        selector: PlanSelector,
        capture: Capture,
        tolerance: float | None,
        memory: MemoryDomain,
    ) -> None:
        self.tracker = tracker
        self._memory = memory
        # Hears once that there is too much noise and no room for more bits.
        self.tell: Callable[[str], None] = logging.getLogger("daf").warning
        self.history: list[NoiseRecord] = []
        self._plan_selector = selector
        self._capture = capture
        self._is_told = False
        self._asked = tolerance
        self.tolerance = DEFAULT_TOLERANCE if tolerance is None else tolerance
        self._watch = NoiseWatch(
            max(self.tolerance, LEAST_TOLERANCE),
            lambda _: self._has_widened,
            interval=1,
            memory=0.0,
            on_record=self._note,
        )
        self._has_widened = False
        self._searched_ms = 0.0  # counted so far
        self._by_site: dict[Site, float] = {}
        self._valid_for: tuple[object, ...] = (None, None, None)

    @property
    def by_site(self) -> dict[Site, float]:
        """Noise of each site's code relative to the batch's own, in the last step; most first."""
        return dict(sorted(self._by_site.items(), key=lambda each: -each[1]))

    def weigh(
        self, profiles: Profiles, plan: Plan, batch: Any, loss_fn: LossFunction, budget_bytes: int
    ) -> Profiles:
        """The profiles with sensitivities, measured if the plan codes anything and they fit.

        Raises:
            DataError: the sensitivities at hand are of another model.
        """
        if self.tracker.sensitivity is None and plan.added_noise > 0.0:
            resident = self._memory.held_bytes()
            room = Room(profiles[0], profile_for(plan, profiles), budget_bytes)
            pool_bytes = self._capture.pool_bytes
            self.tracker.measure(batch, loss_fn, 0, room=room, pool_bytes=pool_bytes)
            # Code that was loaded for it, and small blocks of the allocator's, came to stay.
            stays = max(0, self._memory.held_bytes() - resident)
            profiles = _with_resident(profiles, stays)
        return self.weighed(profiles)

    def weighed(self, profiles: Profiles) -> Profiles:
        """The profiles with the sensitivities that are at hand.

        Raises:
            DataError: they are of another model.
        """
        own, fused = profiles
        self.tracker.check(each for each in profiles if each is not None)
        return self.tracker.weighed(own), None if fused is None else self.tracker.weighed(fused)

    def with_weights(self, policy: Policy) -> Policy:
        """A policy that no planner made, so that a pool gives up the least harmful planes first."""
        found = self.tracker.sensitivity
        return policy if found is None else replace(policy, weights=found.weights())

    def after_step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        running: Plan,
        step: tuple[int, float],
        budget_bytes: int | None,
    ) -> StepNoise:
        """Count the noise of a step, and measure anew if that is due; then plan anew.

        Args:
            batch: of the step.
            loss_fn: the user's own.
            running: the plan that it ran under.
            step: its index and milliseconds.
            budget_bytes: what is planned for.
        """
        index, step_ms = step
        self.tracker.schedule.note_step(step_ms)
        self._count_search()
        before_ms = self.tracker.schedule.measured_ms
        if is_lossy(running.policy) and self.tracker.is_due(batch, step_ms):
            self._measure(batch, loss_fn, running, index, budget_bytes)
        measuring_ms = self.tracker.schedule.measured_ms - before_ms
        self._count(running)
        found = self.tracker.sensitivity
        own = None if found is None else found.variance_of(batch_size(batch))
        if not own:
            return StepNoise(measuring_ms=measuring_ms)
        lost = self._noise_of_evicted()
        return StepNoise(own * (sum(self._by_site.values()) + lost), own, measuring_ms)

    def widen(self, budget_bytes: int | None) -> bool:
        """Codes of at least a bit more from now on; False: the budget has no room for them."""
        plan = self._plan_selector.plan
        if plan is None:
            return False
        if self._plan_selector.profile is None or budget_bytes is None:
            wider = one_bit_wider(plan.policy)
            self._plan_selector.plan = replace(plan, policy=wider)
            return wider != plan.policy
        noise = max(plan.added_noise, plan.bounded_noise)
        return self._plan_selector.widen(noise / NOISE_OF_A_BIT, budget_bytes)

    # --- measuring --------------------------------------------------------------------------

    def _measure(
        self,
        batch: Any,
        loss_fn: LossFunction,
        running: Plan,
        index: int,
        budget_bytes: int | None,
    ) -> None:
        profile = self._plan_selector.profile
        planned = profile is not None and budget_bytes is not None
        room = None
        if profile is not None and budget_bytes is not None:
            operated = self._plan_selector.profile_of(running)
            room = Room(profile, operated, self._plan_selector.modelled(budget_bytes))
        is_new = self.tracker.measure(
            batch,
            loss_fn,
            index,
            room=room,
            policy=None if planned else running.policy,
            pool_bytes=self._capture.pool_bytes,
        )
        if not is_new:
            return
        self._has_widened = False
        if profile is not None and budget_bytes is not None:
            self._replan(running, budget_bytes)
        elif self._plan_selector.plan is not None:
            policy = self.with_weights(running.policy)
            self._plan_selector.plan = replace(self._plan_selector.plan, policy=policy)
        self._count(running)
        self._observe(index)

    def _replan(self, running: Plan, budget_bytes: int) -> None:
        start_s = time.perf_counter()
        weighed = self.tracker.weighed(self._plan_selector.profile_of(running))
        old = sum(expected_noise(weighed, running.policy, running.micro_batch).values())
        self._plan_selector.reweigh(self.weighed(self._plan_selector.profiles), budget_bytes)
        plan = self._plan_selector.plan
        self._has_widened = plan is not None and plan.added_noise < old
        self.tracker.schedule.note_plan(1000.0 * (time.perf_counter() - start_s))

    def _count_search(self) -> None:
        """What is sought because of new numbers is part of their price; the first plan is not."""
        ended_ms = self._plan_selector.reweighed_ms
        self.tracker.schedule.note_search(ended_ms - self._searched_ms)
        self._searched_ms = ended_ms

    def _observe(self, index: int) -> None:
        found = self.tracker.sensitivity
        if found is not None and found.batch_variance and self._asked != 0.0:
            added = sum(self._by_site.values()) + self._noise_of_evicted()
            self._watch.note(index, added * found.batch_variance, found.batch_variance)

    def _note(self, record: NoiseRecord) -> None:
        self.history.append(record)
        if record.response is Response.NO_ROOM and not self._is_told:
            self._is_told = True
            self.tell(
                f"at step {record.step} codes add {record.relative_noise:.2f} of the batch's own "
                f"gradient noise, and {record.tolerance:.2f} were asked for at most; training goes "
                "on, because there is no room for more bits: raise the budget, the bits or the "
                "batch if the loss suffers"
            )

    # --- counting ---------------------------------------------------------------------------

    def _count(self, running: Plan) -> None:
        """What the plan's codes add, known again only when the plan or the numbers are others."""
        found = self.tracker.sensitivity
        key = (running, found, self._plan_selector.profile)
        if all(one is other for one, other in zip(key, self._valid_for, strict=True)):
            return
        self._valid_for = key
        if found is None or not found.batch_variance:
            self._by_site = {}
        elif self._plan_selector.profile is not None:
            profile = self._plan_selector.profile_of(running)
            self._by_site = expected_noise(profile, running.policy, running.micro_batch)
        else:
            own = found.batch_variance
            self._by_site = {
                each.site: found.sites[each.site].at_least * relative_error(each.treatment) / own
                for each in self._capture.sites()
                if each.site in found.sites
            }

    def _noise_of_evicted(self) -> float:
        """What planes that the pool gave up in the last step add on top."""
        if not self._capture.stats.evicted_bytes:
            return 0.0
        return sum(
            self._by_site.get(each.site, 0.0) * (_growth(each) - 1.0)
            for each in self._capture.sites()
            if each.evicted_bytes
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs (JSON-able)."""
        tolerance = self._plan_selector.constraints.tolerance
        aims = list(tolerance) if isinstance(tolerance, tuple) else None
        return {"tracker": self.tracker.state_dict(), "is_told": self._is_told, "aims": aims}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.tracker.load_state_dict(state["tracker"])
        self._is_told = state["is_told"]
        if state["aims"] is not None:
            constraints = self._plan_selector.constraints
            self._plan_selector.constraints = constraints._replace(tolerance=tuple(state["aims"]))


def _with_resident(profiles: Profiles, more_bytes: int) -> Profiles:
    """Of a process that holds more between its steps."""
    own, fused = (
        each and replace(each, resident_bytes=each.resident_bytes + more_bytes) for each in profiles
    )
    assert own is not None
    return own, fused


def _growth(report: SiteReport) -> float:
    """By which factor the error of a code grew when some of its planes were given up."""
    bits = report.treatment.bits
    if report.treatment.method is not Method.ROTATED or bits < 1:
        return 1.0
    block = plane_bytes(BLOCK_ELEMENTS, 1)
    blocks = report.held_bytes / (header_bytes(BLOCK_ELEMENTS) + bits * block)
    return error_growth(bits, report.evicted_bytes / (blocks * block))
