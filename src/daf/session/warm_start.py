"""What one session has measured begins the next one of the same job, in another process too.

Kept is what a resumed run goes on from, less what belongs to one run. The batch's cut is proven
again before the first step; replays and recipes are compared in training, as always; a budget that
the process cannot keep with the plan refuses memory, and a tighter plan follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from daf.core.errors import BudgetError
from daf.core.json_dataclasses import from_plain, to_plain
from daf.core.plan import Plan
from daf.files.cache import cache_folder, keep, kept
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
    has_begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._is_new = True
        self._place: tuple[Path, str] | None = None
        self._is_settled = False
        self._plan: Plan | None = None  # as kept

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
        # No plan fits any more, another version kept it, or host memory is not there.
        with suppress(BudgetError, KeyError, TypeError, ValueError):
            begun = self._loaded(context, found)
            if self._is_proven(begun):
                self._plan_beside_more()
                self.has_begun, self._is_settled = True, found["is_settled"]
                self._plan = self.plan_controller.selector.plan
                return begun
        self.splitting.forget()
        self.noise.tracker.sensitivity = None
        self.plan_controller.selector.forget()
        self.plan_controller.predicted_peak_bytes = None
        return context

    def _loaded(self, context: StepContext, found: Mapping[str, Any]) -> StepContext:
        self.splitting.load_state_dict(found["splitting"])
        known = from_plain(Sensitivity | None, found["sensitivity"])
        self.noise.tracker.sensitivity = known
        self.plan_controller.load_state_dict(found["plans"])
        place = (self.splitting, context.seed, context.index)
        return StepContext.of(self.model, context.batch, context.loss_fn, *place)

    def _plan_beside_more(self) -> None:
        """Plan for what this process holds and the other did not; raises BudgetError."""
        profiles = self.plan_controller.selector.profiles
        known_bytes = profiles.own.resident_bytes if profiles else 0
        more_bytes = self.memory.held_bytes() - known_bytes
        if more_bytes > ANOTHER_PROCESS_BYTES:
            self.plan_controller.plan_beside(more_bytes)

    def _is_proven(self, context: StepContext) -> bool:
        """Prove the cut that the plan needs again: values decide it too, and no key knows them."""
        plan, known = self.plan_controller.selector.plan, context.choice
        if plan is None or plan.micro_batch >= context.info.examples:
            return plan is not None
        context.choose(replace(known, refusal=NOT_PROVEN), is_final=False)
        with self.plan_controller.keeper.unbounded():
            self.plan_controller.step_profiles.prove_cut(context, self.plan_controller.budget_bytes)
        now = context.choice
        return (now.cut, now.weighing, now.refusal) == (known.cut, known.weighing, known.refusal)

    def note_step(self) -> None:
        """Keep what is known after the first step, and once the plan is settled."""
        is_settled = self.plan_controller.selector.is_settled
        if self._plan is None or (is_settled and not self._is_settled):
            self.keep()

    def keep(self) -> None:
        """Keep what is known now, unless that is kept."""
        selector, splitting = self.plan_controller.selector, self.splitting.state_dict()
        is_known = selector.plan is not None and selector.profiles is not None
        if self._place is None or splitting is None or not is_known:
            return
        now, before = (selector.is_settled, selector.plan), (self._is_settled, self._plan)
        if now != before:
            self._is_settled, self._plan = now
            sensitivity = to_plain(self.noise.tracker.sensitivity)
            known = {"plans": self.plan_controller.state_dict(), "splitting": splitting}
            keep(*self._place, known | {"sensitivity": sensitivity, "is_settled": now[0]})
