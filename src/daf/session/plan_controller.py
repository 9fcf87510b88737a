"""The plan of every step: measured for, adopted, and made anew when circumstances change.

A session plans anew for a first or larger batch, a moved budget, refused memory, or a step that
held other than predicted. ``PlanSelector`` makes the plans; ``PlanController`` applies them.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from daf.budget.limits import code_bytes
from daf.core.errors import BudgetError, OtherPathError, ReplayError
from daf.core.json_dataclasses import Resumable
from daf.core.notebook import Say, progress_shown
from daf.core.plan import Plan
from daf.core.policy import Policy
from daf.core.profile import Profile, Profiles
from daf.memory.keeper import Keeper
from daf.planning import planner
from daf.planning.options import Allowed
from daf.profiling.beside_memory import BesideMemory
from daf.profiling.split_proof import is_apart
from daf.session.budget_controller import BudgetController
from daf.session.noise_controller import NoiseController
from daf.session.plan_autotuner import StepMeasurement
from daf.session.plan_selector import MORE_ROOM_BYTES, PlanSelector
from daf.session.step_profiles import AHEAD, ProfileGrowth, StepProfiles
from daf.step.context import BatchInfo, StepContext
from daf.step.loss_weights import ANY_COUNT, Weighing
from daf.step.splitting import NOT_PROVEN, SplitChoice

# PyTorch's kernels of another plan stay in the process for good: 4 MB over budget were seen. A
# trial plan is refused that memory, and the plan before goes on.
NEW_OPERATORS_BYTES = 8 * 2**20

# A refused budget of at least this share of what would do may be one that an error named.
NEAR = 0.95


@dataclass(eq=False)
class PlanController(Resumable):
    """Finds each step's plan; without a budget every step runs under ``fixed_policy``.

    ``planned_budget_bytes``: the budget of the plan in force; ``predicted_peak_bytes``: the highest
    predicted, None before a plan; ``allowed`` returns what execution can carry out now.
    """

    KEPT = ("planned_for_bytes", "uncut_examples", "planned_budget_bytes", "predicted_peak_bytes")

    selector: PlanSelector
    step_profiles: StepProfiles
    noise: NoiseController
    keeper: Keeper
    budget_controller: BudgetController
    allowed: Callable[[], Allowed]
    fixed_policy: Policy
    growth: ProfileGrowth = field(default_factory=ProfileGrowth)
    predicted_peak_bytes: int | None = None
    planned_for_bytes: int = 0  # of the measured batch
    # Of gradients that the user holds beside a step's own: now, and at most.
    users_gradient_bytes: int = 0
    most_users_gradient_bytes: int = 0
    uncut_examples: int = 0  # of the largest batch so far, where no plan cuts any
    proven_again_at: int = -1  # the step
    cut_steps: int = 0  # since this session began
    # What plans leave beside the usual (bytes), where no pass is tried again.
    margin_bytes: Callable[[Profile], int] = field(default=lambda _: 0)
    # The most held so far (bytes), where loading and measuring count, too.
    held_before: Callable[[], int] = field(default=lambda: 0)

    def __post_init__(self) -> None:
        self.planned_budget_bytes = self.budget_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The budget in force (bytes); None without one."""
        return self.budget_controller.budget_bytes

    @property
    def is_planned(self) -> bool:
        """True if plans are made from a profile, so that tighter ones may exist."""
        return self.selector.profiles is not None

    def prepare(self, context: StepContext, on_progress: Say | None = None) -> Plan:
        """Profile on this batch and plan, unless that was done; raises as ``Session.prepare``."""
        if self.selector.plan is not None:
            return self.selector.plan
        if (budget_bytes := self.budget_bytes) is None:
            return self._without_budget(context.info)
        planner.warm_up()
        self.planned_for_bytes = context.info.nbytes
        self.planned_budget_bytes = budget_bytes
        self.keeper.open()
        try:
            self.keeper.least_code_bytes = code_bytes(budget_bytes)
            self.step_profiles.refuse_without_room(budget_bytes, self.resident_bytes)
            profiles = self._measured(context, on_progress, budget_bytes)
            try:
                plan = self._begun(context, profiles, budget_bytes)
            except BudgetError as error:
                if profiles.own.split_refusal or budget_bytes < NEAR * (error.least_bytes or 0):
                    raise
                # Larger steps, for which this one had room, promise other bytes of the smallest.
                timed = profiles.own.micro_batch_ms
                smallest = self._measured(context, on_progress, 0)  # as where it was named
                profiles = smallest.changed(lambda each: replace(each, micro_batch_ms=timed))
                plan = self._begun(context, profiles, budget_bytes)
            self.keeper.flush()  # what planning held
            self.keeper.drop_code()  # and the solver's code, which steps do not run
            return self._adopt(plan)
        except BaseException:  # no plan fits, or an interrupt: without a plan nothing is bounded
            self.keeper.close()
            raise

    def resident_bytes(self) -> int:
        """Return what is held (bytes) with the code that steps need; other code is given back."""
        self.keeper.least_code_bytes = code_bytes(self.budget_bytes or 0)
        beside = BesideMemory(self.step_profiles.memory, self.keeper)
        beside.drop_code()
        return beside.resident_bytes()

    def _begun(self, context: StepContext, profiles: Profiles, budget_bytes: int) -> Plan:
        self.keeper.bound(budget_bytes, budget_bytes)
        self.budget_controller.watch()
        weigh = partial(self.noise.weigh, context=context, budget_bytes=budget_bytes)
        self.selector.loaded_bytes = self.held_before()
        return self.selector.begin(self.noise.weighed(profiles), budget_bytes, weigh)

    def _measured(
        self, context: StepContext, on_progress: Say | None, budget_bytes: int
    ) -> Profiles:
        with self.keeper.unbounded(), progress_shown(on_progress) as say:
            profiles = self.step_profiles.measure(
                context, budget_bytes, say, can_fuse=self.selector.can_fuse
            )
        alone = profiles.beside(-self.users_gradient_bytes)  # they were there meanwhile
        self.growth.note(context.info, alone)
        self.selector.allow(self.allowed())
        return self._beside_users(alone)

    def _beside_users(self, profiles: Profiles) -> Profiles:
        return profiles.beside(self.most_users_gradient_bytes + self.margin_bytes(profiles.own))

    def plan_for(self, context: StepContext) -> Plan:
        """Return the plan for the step that begins now; raises BudgetError before it."""
        self.follow_budget(self.budget_controller.begin_step())
        if self.budget_bytes is not None and context.info.nbytes > self.planned_for_bytes:
            self._outgrow(context, self.budget_bytes)
        self.selector.between_steps()
        plan = self._adopt(self.prepare(context))
        if self.budget_bytes is not None and self.is_planned:
            refusal = self.selector.constraints.allowed.release_refusal
            if refusal != self.allowed().release_refusal:  # gradients may be released, or no more
                plan = self._replan(self.budget_bytes)
        running = self.selector.running or plan
        if context.choice.refusal and running.micro_batch < context.info.examples:
            plan = self._with_proof(running, context)
        plan = self._renewed(context, self.selector.running or plan)
        is_new = self.selector.autotuner.is_trying_another
        self.keeper.spare_more_bytes = NEW_OPERATORS_BYTES if is_new else 0
        return self._whole(self.selector.running or plan, context.info)

    def note_accumulated(self, nbytes: int) -> None:
        """Plan for a step beside gradients of the user (bytes); raises as ``plan_for``."""
        more = nbytes - self.most_users_gradient_bytes
        self.users_gradient_bytes = nbytes
        self.most_users_gradient_bytes += max(0, more)
        self.plan_beside(more)

    def plan_beside(self, more_bytes: int) -> None:
        """Plan for steps that hold so much more than was measured; raises as ``plan_for``."""
        profiles, budget_bytes = self.selector.profiles, self.budget_bytes
        if more_bytes > 0 and profiles is not None and budget_bytes is not None:
            self.selector.regrow(profiles.beside(more_bytes), budget_bytes)
            self.planned_budget_bytes = budget_bytes

    def _outgrow(self, context: StepContext, budget_bytes: int) -> None:
        """Plan anew from near smaller batches if that fits; else forget, to measure this batch."""
        for ahead in (AHEAD, 1.0):
            profiles = self.growth.reached(context.info, ahead) if self.selector.plan else None
            if profiles is None:
                break
            with suppress(BudgetError):
                self.selector.regrow(self.noise.weighed(self._beside_users(profiles)), budget_bytes)
                self.planned_for_bytes = int(context.info.nbytes * ahead)
                return
        self.selector.forget()

    def _without_budget(self, info: BatchInfo) -> Plan:
        self.uncut_examples = info.examples
        policy, why = self.noise.with_weights(self.fixed_policy), "no budget was given"
        plan = Plan(
            policy, info.examples, predicted_peak_bytes=0, return_freed_blocks=False, reason=why
        )
        self.selector.settle_on(plan)
        return plan

    def _whole(self, plan: Plan, info: BatchInfo) -> Plan:
        """Grow an unplanned plan to the batch: without a budget no batch is cut."""
        is_uncut = self.budget_bytes is None and plan.micro_batch == self.uncut_examples
        if not is_uncut or info.examples <= self.uncut_examples:
            return plan
        self.uncut_examples = info.examples
        larger = replace(plan, micro_batch=info.examples)
        self.selector.settle_on(larger)
        return larger

    def follow_budget(self, budget_bytes: int | None) -> None:
        """Plan anew if the budget differs from the one that the plan was made for."""
        if budget_bytes == self.planned_budget_bytes or self.selector.plan is None:
            return
        self.planned_budget_bytes = budget_bytes
        if budget_bytes is None or not self.is_planned:
            self.keeper.close()
            self.selector.forget()
            return
        self._replan(budget_bytes)

    def _replan(self, budget_bytes: int) -> Plan:
        self.selector.allow(self.allowed())
        return self._adopt(self.selector.again(budget_bytes, can_refuse=self.keeper.can_refuse))

    def _adopt(self, plan: Plan) -> Plan:
        if self.budget_bytes is None:
            return plan
        if plan.return_freed_blocks:
            self.keeper.open()
        else:
            self.keeper.close()
        if self.selector.evidence is None:
            known = self.predicted_peak_bytes or 0
            self.predicted_peak_bytes = max(known, plan.predicted_peak_bytes)
        return plan

    def tighter(self, plan: Plan) -> Plan | None:
        """Adopt and return the next tighter plan, parameters untouched; None if none is known."""
        self.budget_controller.follow()
        if not self.is_planned or self.budget_bytes is None:
            return None
        self.keeper.spare_more_bytes = 0  # a tighter plan is known to fit
        if self.budget_bytes != self.planned_budget_bytes:  # it moved in mid-step
            self.planned_budget_bytes = self.budget_bytes
            moved = self._replan(self.budget_bytes)
            if moved.predicted_peak_bytes < plan.predicted_peak_bytes:
                return moved
        tighter = self.selector.tighten(plan)
        self.keeper.flush()  # what planning held
        return None if tighter is None else self._adopt(tighter)

    def _with_proof(self, plan: Plan, context: StepContext) -> Plan:
        if self.budget_bytes is None and context.choice.refusal == NOT_PROVEN:
            self.step_profiles.prove_cut(context, None)
        if not context.choice.refusal:
            return plan
        if context.choice.refusal != NOT_PROVEN or self.budget_bytes is None:
            return self.stop_splitting(context, context.choice.refusal)
        self.selector.forget()
        return self._adopt(self.prepare(context))

    def prove_again(self, context: StepContext, plan: Plan, found: OtherPathError) -> Plan:
        """Return ``plan`` if this step's functions are proven too, else as ``stop_splitting``."""
        known = context.choice
        if self.proven_again_at == context.index:
            return self.stop_splitting(context, str(found))
        self._prove(context)
        if context.choice.refusal:
            return self.stop_splitting(context, context.choice.refusal)
        # Other examples may be routed through other parameters, or run what is the same more often.
        routed = {name for name in found.unknown if " " in name}
        self._accept(context, context.choice, known.functions | context.choice.functions | routed)
        return plan

    def _prove(self, context: StepContext) -> None:
        self.proven_again_at = context.index
        context.choose(replace(context.choice, refusal=NOT_PROVEN), is_final=False)
        with self.keeper.unbounded():
            self.step_profiles.prove_cut(context, self.budget_bytes)

    def _renewed(self, context: StepContext, plan: Plan) -> Plan:
        """Return the plan once the cut was proven again, in each step that doubles those cut."""
        # Weights move, a term that was flat or 0 begins to act, examples that were alike differ.
        known = context.choice
        if not known.functions or known.refusal or plan.micro_batch >= context.info.examples:
            return plan
        self.cut_steps += 1
        is_alike = known.cut.alike(context.batch, known.alike) == known.alike
        if is_alike and (self.cut_steps == 1 or self.cut_steps & (self.cut_steps - 1)):
            return plan
        self._prove(context)
        found = context.choice
        if found.refusal and not is_apart(found.refusal):  # no room, or it shows nothing
            context.choose(known)
            return plan
        both = {found.weighing, known.weighing}
        is_other = len(both) > 1 and both != {Weighing.EXAMPLES, Weighing.LOSS}
        if found.refusal or is_other:
            return self.stop_splitting(context, found.refusal or "its parts weigh otherwise now")
        weighing = Weighing.LOSS if Weighing.LOSS in both else found.weighing  # which shows more
        seen = replace(found, weighing=weighing, alike=known.alike & found.alike)
        self._accept(context, seen, known.functions | found.functions)
        return plan

    def _accept(self, context: StepContext, choice: SplitChoice, seen: frozenset[str]) -> None:
        """Cut batches so from now on, and this one, which was proven, however often what runs."""
        context.choose(replace(choice, functions=seen))
        context.choice = replace(choice, functions=seen | {ANY_COUNT})

    def stop_splitting(self, context: StepContext, reason: str) -> Plan:
        """Plan for whole batches where parts turned out not to add up; raises as ``plan_for``."""
        context.choose(replace(context.choice, refusal=reason))
        if self.budget_bytes is None:
            return self._without_budget(context.info)
        self.selector.refuse_splitting(reason)
        return self._replan(self.budget_bytes)

    def may_stop_replaying(self, module: str) -> bool:
        """True where plans are made, and one of them may have replayed this module."""
        profiles = self.selector.profiles if self.budget_bytes is not None else None
        return profiles is not None and module not in profiles.own.replay_refusals

    def stop_replaying(self, error: ReplayError) -> Plan:
        """Plan without a module's replay where it did something else; raises as ``plan_for``."""
        assert self.budget_bytes is not None
        self.selector.refuse_replay(error.module, f"in training it did something else: {error}")
        return self._replan(self.budget_bytes)

    def has_room_again(self, plan: Plan) -> bool:
        """True if the budget was lifted or raised while memory was refused, so that a plan fits."""
        budget_bytes = self.budget_bytes
        fits = budget_bytes is None or plan.predicted_peak_bytes <= budget_bytes
        return fits and self.budget_controller.has_risen

    def refusal(self) -> BudgetError | None:
        """Return the error to raise when no plan can hold the step; None without a budget."""
        profiles, budget_bytes = self.selector.profiles, self.budget_controller.lowest_bytes
        if profiles is None or self.budget_bytes is None or budget_bytes is None:
            return None
        # The first allocation that a step lacks is seldom its last.
        more_bytes = MORE_ROOM_BYTES + budget_bytes // 100 if self.keeper.missing_bytes else 0
        needed_bytes = budget_bytes + self.keeper.missing_bytes + more_bytes
        least = max(self.selector.least_bytes(), needed_bytes)
        return BudgetError(planner.refusal(profiles.own, budget_bytes, least), least)

    def update_bytes(self, *, has_state: bool) -> int:
        """Return the predicted bytes of the optimizer's step, with its state unless it has one."""
        if self.selector.profiles is None:
            return 0
        own = self.selector.profiles.own
        return own.update_bytes + (0 if has_state else own.optimizer_bytes)

    def learn(self, running: Plan, ran: StepMeasurement, peak_bytes: int, batch_bytes: int) -> None:
        """Correct or tighten the plan by a step that ended and the peak of bounded memory."""
        self.keeper.code_returned()
        if self.keeper.overrun_bytes:
            self.tighter(running)
        elif self.selector.first is not None:
            has_moved = self.planned_budget_bytes != self.budget_bytes
            self.selector.correct(peak_bytes, None if has_moved else self.budget_bytes)
        else:
            share = batch_bytes / max(1, self.planned_for_bytes)
            self.selector.note_step(running, ran, share)

    def state_dict(self) -> dict[str, Any]:
        return self.selector.state_dict() | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; raises ValueError as ``Session.load_state_dict``."""
        self.selector.load_state_dict(state)
        super().load_state_dict(state)
        plan, allowed = self.selector.plan, self.allowed()
        if plan is not None and plan.policy.on_host and not allowed.host_bytes:
            raise ValueError(
                "asked to go on with a plan whose codes wait in host memory, in a session without; "
                "give host_bytes as the session had that made the plan"
            )
        self.selector.allow(allowed)
        if plan is not None and plan.return_freed_blocks:
            self.keeper.open()
        if state["was_searching"] and self.planned_budget_bytes is not None:
            self.selector.search_again(self.planned_budget_bytes)
