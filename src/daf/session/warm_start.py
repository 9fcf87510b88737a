"""What one session has measured begins the next one of the same job, in another process too.

Kept is what a resumed run goes on from, less what belongs to one run. The batch's cut is proven
again before the first step; replays and recipes are compared in training, as always; a budget that
the process cannot keep with the plan refuses memory, and a tighter plan follows.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from daf.core.errors import BudgetError
from daf.core.json_dataclasses import from_plain, to_plain
from daf.core.plan import Plan
from daf.core.step_report import StepReport
from daf.files.cache import cache_folder, drop, keep, kept
from daf.memory.domain import MemoryDomain
from daf.sensitivity.result import Sensitivity
from daf.session.noise_controller import NoiseController
from daf.session.plan_controller import PlanController
from daf.session.plan_selector import ANOTHER_PROCESS_BYTES
from daf.step.batch_cut import BatchSplit
from daf.step.context import StepContext
from daf.step.job_key import job_key
from daf.step.splitting import NOT_PROVEN, Splitting

NEAR = 1.25  # a factor between budgets


@dataclass(eq=False)
class WarmStart:
    """One session's. ``options``: its arguments; ``has_begun``: True if something was known."""

    model: nn.Module
    optimizer: Any
    memory: MemoryDomain
    plan_controller: PlanController
    noise: NoiseController
    splitting: Splitting
    options: Mapping[str, Any]
    is_wanted: bool = True
    has_begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._is_new = self.is_wanted
        self._place: tuple[Path, str] | None = None
        self._is_settled = self._has_stepped = False
        self._plan: Plan | None = None  # as kept
        self._measured = 0  # how often, when it was kept first

    def begin(self, context: StepContext) -> StepContext:
        """Take what is known of the job of this first step; measure where anything differs."""
        is_new, self._is_new = self._is_new, False
        if not is_new or not self._may_know() or (folder := cache_folder("starts")) is None:
            return context
        # What was measured within a budget serves those near it, and no other.
        near = round(math.log(self.plan_controller.budget_bytes or 1, NEAR))
        options = {**self.options, "budget": near}
        name = job_key(self.model, self.optimizer, context.batch, context.loss_fn, options)
        if name is None:
            return context
        self._place = folder, name
        found = kept(folder, name)
        return context if found is None else self._begun(context, found)

    def _may_know(self) -> bool:
        own = isinstance(self.splitting.split, BatchSplit)
        given = isinstance(self.options["sensitivity"], Sensitivity)
        is_new = self.plan_controller.selector.plan is None
        return is_new and self.plan_controller.budget_bytes is not None and not (own or given)

    def _begun(self, context: StepContext, found: Mapping[str, Any]) -> StepContext:
        selector, begun = self.plan_controller.selector, None
        self._tolerance = selector.constraints.tolerance
        try:  # no plan may fit any more, another version kept it, host memory is not there
            with suppress(BudgetError, KeyError, TypeError, ValueError):
                begun = self._taken(context, found)
            self.has_begun = begun is not None
        finally:  # an interrupt, too
            if not self.has_begun:
                self._abandon()
        self._is_settled, self._plan = bool(found.get("is_settled")), selector.plan
        return begun or context

    def _taken(self, context: StepContext, found: Mapping[str, Any]) -> StepContext | None:
        self.splitting.load_state_dict(found["splitting"])
        known = from_plain(Sensitivity | None, found["sensitivity"])
        self.noise.tracker.sensitivity = known
        controller, place = self.plan_controller, (self.splitting, context.seed, context.index)
        controller.load_state_dict(found["plans"])
        begun = StepContext.of(self.model, context.batch, context.loss_fn, *place)
        if not self._is_proven(begun):
            return None
        profiles, held_bytes = controller.selector.profiles, controller.resident_bytes()
        more_bytes = held_bytes - (profiles.own.resident_bytes if profiles else 0)
        if more_bytes > ANOTHER_PROCESS_BYTES:  # than the other process held
            controller.plan_beside(more_bytes)
            self._place = None
        controller.follow_budget(controller.budget_bytes)  # near; the least plan, if none fits it
        plan, budget_bytes = controller.selector.plan, controller.budget_bytes or 0
        least_bytes = max(plan.predicted_peak_bytes if plan else 0, controller.held_before())
        return begun if plan and least_bytes <= budget_bytes else None

    def _is_proven(self, context: StepContext) -> bool:
        """Prove again how batches are cut: values decide it too, and no key knows them."""
        known, controller = context.choice, self.plan_controller
        if known.refusal or controller.selector.plan is None:
            return controller.selector.plan is not None
        context.choose(replace(known, refusal=NOT_PROVEN), is_final=False)
        with controller.keeper.unbounded():
            controller.step_profiles.prove_cut(context, controller.budget_bytes)
        now = context.choice
        return (now.cut, now.weighing, now.refusal) == (known.cut, known.weighing, known.refusal)

    def _abandon(self) -> None:
        self.has_begun, self._plan = False, None
        self.splitting.forget()
        self.noise.tracker.sensitivity = None
        controller, selector = self.plan_controller, self.plan_controller.selector
        selector.forget()
        selector.profiles, selector.evidence = None, None
        selector.constraints = replace(selector.constraints, tolerance=self._tolerance)
        controller.predicted_peak_bytes, controller.planned_for_bytes = None, 0

    def step(self, run: Callable[[], StepReport]) -> StepReport:
        """Run a step; what is known is kept after the first one, and once the plan is settled.

        A first step that does not fit as it did is measured, and what was known is dropped.
        """
        try:
            report = run()
        except BudgetError:
            if not self.has_begun or self._has_stepped:
                raise
            if self._place is not None:
                drop(*self._place)
            self._abandon()
            report = run()
        self._has_stepped = True
        is_settled = self.plan_controller.selector.is_settled
        if self._plan is None or (is_settled and not self._is_settled):
            self.keep()
        return report

    def stop(self) -> None:
        """Keep and forget nothing from now on: what this session knows is not the job's own."""
        self._place, self._has_stepped = None, True

    def keep(self) -> None:
        """Keep what is known now, unless that is kept, or was measured of another loss or batch."""
        controller, splitting = self.plan_controller, self.splitting.state_dict()
        selector, measured = controller.selector, controller.step_profiles.measured
        self._measured = measured if self._plan is None else self._measured
        is_own = measured == self._measured and not controller.most_users_gradient_bytes
        is_known = selector.plan is not None and selector.profiles is not None
        if self._place is None or splitting is None or not (is_known and is_own):
            return
        now, before = (selector.is_settled, selector.plan), (self._is_settled, self._plan)
        if now != before:
            self._is_settled, self._plan = now
            sensitivity = to_plain(self.noise.tracker.sensitivity)
            known = {"plans": controller.state_dict(), "splitting": splitting}
            keep(*self._place, known | {"sensitivity": sensitivity, "is_settled": now[0]})
