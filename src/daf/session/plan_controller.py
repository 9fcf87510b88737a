"""The plan of every step: measured for, adopted, and made anew where something asks for it.

What asks: a first or a larger batch, a budget that moved, memory that was
refused, a step that took or held other than was predicted. ``PlanSelector`` knows
the plans; here they meet the process, whose allocator and limit they set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.core.policy import Policy
from daf.kernels.devices import can_code_on
from daf.memory.domain import MemoryDomain, device_of
from daf.memory.limit_protocol import Keeper
from daf.planning import planner
from daf.planning.options import Allowed
from daf.session.arguments import refuse_without_room
from daf.session.budget_controller import BudgetController
from daf.session.noise_controller import NoiseController
from daf.session.plan_autotuner import StepMeasurement
from daf.session.plan_selector import PlanSelector
from daf.session.step_profiles import StepProfiles
from daf.step.microbatch import LossFunction, batch_bytes, batch_size

# What PyTorch's kernels of another plan leave in the process for good: 4 MB beyond a budget were
# seen. A plan that is only tried is refused that memory, and the one before goes on.
NEW_OPERATORS_BYTES = 8 * 2**20
_KEPT = (
    "planned_for_bytes",
    "uncut_examples",
    "planned_budget_bytes",
    "predicted_peak_bytes",
)


class PlanMeans(NamedTuple):
    """What plans are made and carried out with."""

    memory: MemoryDomain
    selector: PlanSelector
    measuring: StepProfiles
    noise: NoiseController
    keeper: Keeper
    controller: BudgetController
    allowed: Callable[[], Allowed]


class PlanController:
    """Finds each step's plan.

    ``planned_budget_bytes``: what the plan in force was made for; ``predicted_peak_bytes``: the
    highest peak that was predicted of a plan, None before the first.

    Args:
        model: what is trained.
        fixed_policy: what every step runs under where there is no budget.
        means: shared with the session.
    """

    def __init__(self, model: nn.Module, fixed_policy: Policy, means: PlanMeans) -> None:
        self._model = model
        self._fixed_policy = fixed_policy
        self._means = means
        self._plan_selector = means.selector
        self._keeper = means.keeper
        self.predicted_peak_bytes: int | None = None
        self.planned_budget_bytes = self._budget_bytes
        self.planned_for_bytes = 0  # of the batch that was measured
        self.uncut_examples = 0  # of the largest batch so far, where no plan cuts any

    @property
    def _budget_bytes(self) -> int | None:
        return self._means.controller.budget_bytes

    # --- before a step ----------------------------------------------------------------------

    def prepare(
        self, batch: Any, loss_fn: LossFunction, on_progress: Callable[[str], None]
    ) -> Plan:
        """Profile on this batch and plan, unless that was done.

        Raises:
            BudgetError: no plan fits; ``least_bytes`` is the least budget that would.
        """
        if self._plan_selector.plan is not None:
            return self._plan_selector.plan
        if self._budget_bytes is None:
            return self._without_budget(batch)
        refuse_without_room(self._model, self._budget_bytes, self._means.memory)
        planner.warm_up()
        self.planned_for_bytes = batch_bytes(batch)
        budget_bytes = self.planned_budget_bytes = self._budget_bytes
        self._keeper.open()
        with self._keeper.unbounded():
            profile, fused = self._means.measuring.profiles(
                batch, loss_fn, budget_bytes, on_progress, can_fuse=self._can_fuse
            )
        self.know_what_is_allowed()
        try:
            self._keeper.bound(budget_bytes, budget_bytes)
            self._means.controller.watch()
            weigh = partial(
                self._means.noise.weigh, batch=batch, loss_fn=loss_fn, budget_bytes=budget_bytes
            )
            profile, fused = self._means.noise.weighed((profile, fused))
            plan = self._plan_selector.begin(profile, budget_bytes, fused, weigh)
        except BudgetError:
            self._keeper.close()
            raise
        self._keeper.flush()  # what planning held
        return self._adopt(plan)

    @property
    def _can_fuse(self) -> bool:
        """Fused operators read codes, which need kernels where the model is."""
        return self._plan_selector.can_fuse and can_code_on(device_of(self._model))

    def know_what_is_allowed(self) -> None:
        """Plan from now on with what this session's execution can carry out."""
        self._plan_selector.allow(self._means.allowed())

    def plan_for(self, batch: Any, loss_fn: LossFunction) -> Plan:
        """What the step that begins now runs under.

        Raises:
            BudgetError: no plan fits; parameters are untouched.
        """
        self._follow_budget(self._means.controller.begin_step())
        if self._budget_bytes is not None and batch_bytes(batch) > self.planned_for_bytes:
            self._plan_selector.forget()
        self._plan_selector.between_steps()
        plan = self._adopt(self.prepare(batch, loss_fn, lambda _: None))
        is_new = self._plan_selector.autotuner.is_trying_another
        self._keeper.spare_more_bytes = NEW_OPERATORS_BYTES if is_new else 0
        return self._whole(self._plan_selector.running or plan, batch)

    def _without_budget(self, batch: Any) -> Plan:
        self.uncut_examples = batch_size(batch)
        plan = Plan(
            self._means.noise.with_weights(self._fixed_policy),
            self.uncut_examples,
            predicted_peak_bytes=0,
            return_freed_blocks=False,
            reason="no budget was given",
        )
        self._plan_selector.settle_on(plan)
        return plan

    def _whole(self, plan: Plan, batch: Any) -> Plan:
        """Where nothing was planned no batch is cut, however much larger than the first."""
        examples = batch_size(batch)
        is_uncut = self._budget_bytes is None and plan.micro_batch == self.uncut_examples
        if not is_uncut or examples <= self.uncut_examples:
            return plan
        self.uncut_examples = examples
        larger = replace(plan, micro_batch=examples)
        self._plan_selector.settle_on(larger)
        return larger

    def _follow_budget(self, budget_bytes: int | None) -> None:
        """Plan anew if the budget is another one than the plan was made for."""
        if budget_bytes == self.planned_budget_bytes or self._plan_selector.plan is None:
            return
        self.planned_budget_bytes = budget_bytes
        if budget_bytes is None or self._plan_selector.profile is None:
            self._keeper.close()
            self._plan_selector.forget()
            return
        self._replan(budget_bytes)

    def _replan(self, budget_bytes: int) -> Plan:
        self.know_what_is_allowed()
        again = self._plan_selector.again(budget_bytes, can_refuse=self._keeper.can_refuse)
        return self._adopt(again)

    def _adopt(self, plan: Plan) -> Plan:
        """Set in the process what the plan asks for; its prediction stands from now on."""
        if self._budget_bytes is None:
            return plan
        if plan.return_freed_blocks:
            self._keeper.open()
        else:
            self._keeper.close()
        if self._plan_selector.evidence is None:
            known = self.predicted_peak_bytes or 0
            self.predicted_peak_bytes = max(known, plan.predicted_peak_bytes)
        return plan

    # --- in a step --------------------------------------------------------------------------

    def tighter(self, plan: Plan) -> Plan | None:
        """The next tighter plan, adopted; None where none is known.

        Parameters are untouched, so the step can be retried.
        """
        if self._plan_selector.profile is None or self._budget_bytes is None:
            return None
        self._keeper.spare_more_bytes = 0  # for a plan that is known to fit
        if self._budget_bytes != self.planned_budget_bytes:  # it moved in mid-step
            self.planned_budget_bytes = self._budget_bytes
            moved = self._replan(self._budget_bytes)
            if moved.predicted_peak_bytes < plan.predicted_peak_bytes:
                return moved
        tighter = self._plan_selector.tighten(plan)
        self._keeper.flush()  # what planning held
        return None if tighter is None else self._adopt(tighter)

    def refusal(self) -> BudgetError:
        """That no plan can hold the step."""
        profile, budget_bytes = self._plan_selector.profile, self._budget_bytes
        assert profile is not None
        assert budget_bytes is not None
        missing = budget_bytes + self._keeper.missing_bytes
        least = max(self._plan_selector.least_bytes(), missing)
        return BudgetError(planner.refusal(profile, budget_bytes, least), least)

    # --- after a step -----------------------------------------------------------------------

    def learn(self, running: Plan, ran: StepMeasurement, peak_bytes: int, batch: Any) -> None:
        """What a step that ended says of its plan."""
        if self._keeper.overrun_bytes:
            self.tighter(running)
        elif self._plan_selector.first is not None:
            self._settle(peak_bytes)
        else:
            share = batch_bytes(batch) / max(1, self.planned_for_bytes)
            self._plan_selector.note_step(running, ran, share)

    def _settle(self, measured_peak_bytes: int) -> None:
        budget_bytes = self.planned_budget_bytes
        if budget_bytes is None or budget_bytes != self._budget_bytes:
            self._plan_selector.first = None
            return  # it moved in mid-step; the next one is planned anew
        self._plan_selector.settle(measured_peak_bytes, budget_bytes)

    # --- resuming ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; plans are ``PlanSelector``'s."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; call it when ``PlanSelector`` has its own."""
        for name in _KEPT:
            setattr(self, name, state[name])
        self.know_what_is_allowed()
        if self._plan_selector.plan is not None and self._plan_selector.plan.return_freed_blocks:
            self._keeper.open()
        if state["was_searching"] and self.planned_budget_bytes is not None:
            self._plan_selector.search_again(self.planned_budget_bytes)
