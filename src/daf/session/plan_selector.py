"""The plan that a session runs under: made, tightened, corrected by the first step, made anew.

A quick plan is there at once; a background search finds the best, which is taken over between two
steps. The first full-size step runs under a plan that holds as little as its micro-batches can; its
measured peak corrects every later plan. ``PlanAutotuner`` then tries plans of other kinds.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from daf.core.errors import BudgetError
from daf.core.json_dataclasses import Resumable
from daf.core.plan import Plan
from daf.core.policy import Policy
from daf.core.profile import Profile, Profiles
from daf.core.reports import LeverRefusal
from daf.planning import planner
from daf.planning.background_search import BackgroundPlan
from daf.planning.bit_widths import wider_level
from daf.planning.explain import left_alone
from daf.planning.options import Allowed
from daf.profiling.small_steps import probe_sizes
from daf.session.plan_autotuner import PlanAutotuner, PlanKind, StepMeasurement, plan_kind
from daf.step.splitting import NO_ROOM_TO_PROVE

# Tried in turn where a tolerance cannot be kept, so that no more noise is added than must be.
WIDER_TOLERANCES = (0.05, 0.14, 0.5, 1.0)
# Longest wait for a plan before the first step, about as long as measuring takes.
PATIENCE_S = 3.0
# Extra bytes that the same process holds when started again; added to a least budget.
ANOTHER_PROCESS_BYTES = 2 * 2**20
# What a process goes on to hold that has room for what another had none for, code apart: kernels'
# buffers for more sizes, what measuring sensitivities leaves (1.2 MB measured), what the proof that
# a batch may be cut holds (needs of 1.5 to 3.6 MB more measured).
MORE_ROOM_BYTES = 4 * 2**20
# Where fewer examples than are usual foretold a whole batch, a least budget has more: a share of
# what is modelled, since not all grows in a straight line (ResNet-18 on images of 32 x 32 took
# 1.5 % more), and what MKL keeps for each thread once products are large (1.8 MB measured).
FEW_EXAMPLES_SHARE = 0.015
THREAD_BYTES = 2 * 2**20
# Bytes that a background search may hold: 20 MB were measured for 1,000 sites.
SEARCH_BYTES = 24 * 2**20
SMALLEST_PEAK_BYTES = 4 * 2**20  # a smaller one is lost in the floor; shares of it mean nothing


@dataclass(frozen=True, slots=True)
class PeakMeasurement:
    """The predicted and the measured peak (bytes) of a full-size step under a budget."""

    predicted_bytes: int
    measured_bytes: int

    def factor(self, floor_bytes: int) -> float:
        """Return measured over predicted bytes above the floor, at least 1."""
        predicted = max(SMALLEST_PEAK_BYTES, self.predicted_bytes - floor_bytes)
        return 1.0 + max(0, self.measured_bytes - self.predicted_bytes) / predicted


Weigh = Callable[[Profiles, Plan], Profiles]


class PlanSelector(Resumable):
    """The plan in force, and how it came to be.

    ``first``: what the next step runs under until measured; ``evidence``: its measured peak.
    ``profiles``: None where nothing is planned.
    """

    KEPT = ("plan", "first", "profiles", "evidence")

    plan: Plan | None = None
    first: Plan | None = None
    profiles: Profiles | None = None
    evidence: PeakMeasurement | None = None
    loaded_bytes: int = 0  # the most held before a plan: a budget below it is broken already

    def __init__(self, constraints: planner.Constraints) -> None:
        self.constraints = constraints
        self.autotuner = PlanAutotuner()
        self.reweighed_ms = 0.0  # processor time of ended searches by new sensitivities
        self._search: BackgroundPlan | None = None
        self._by_numbers: BackgroundPlan | None = None  # the last search by new sensitivities
        self._left_alone: tuple[Profiles, list[LeverRefusal]] | None = None

    @property
    def running(self) -> Plan | None:
        """The plan for the next step."""
        return self.first or self.plan

    @property
    def is_settled(self) -> bool:
        """True if there is nothing to measure, to find or to try."""
        return not (self.first or self._search) and self.autotuner.is_settled

    @property
    def can_fuse(self) -> bool:
        """True if the planner chooses operators too; named levels keep PyTorch's own."""
        return self.constraints.policy == "optimal"

    def allow(self, allowed: Allowed) -> None:
        """Plan from now on with what execution can carry out."""
        if allowed != self.constraints.allowed:
            self._left_alone = None
        self.constraints = replace(self.constraints, allowed=allowed)

    def settle_on(self, plan: Plan | None) -> None:
        """Go on with this plan; search and try nothing else."""
        self._end_search()
        self.plan, self.first = plan, None

    def change_policy(self, policy: Policy) -> None:
        """Go on with the plan in force under another policy, where nothing is planned."""
        assert self.plan is not None
        self.plan = replace(self.plan, policy=policy)

    def give_up_search(self) -> None:
        """Stop searching and trying; the plan in force stays."""
        if self._search is not None:
            self._search.stop()
        self._search = None
        self.autotuner.cancel()

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.finish(0.0)  # steps may need what it holds
        self.give_up_search()

    def forget(self) -> None:
        """Drop the plan and everything learnt."""
        self.settle_on(None)
        self.autotuner.forget()

    def refuse_splitting(self, reason: str) -> None:
        """Plan for whole batches from now on."""
        self.autotuner.forget()
        self.profiles = self._measured.changed(lambda each: replace(each, split_refusal=reason))

    def refuse_replay(self, module: str, reason: str) -> None:
        """Plan without replaying a module (by path) from now on."""
        self.autotuner.forget()
        note = partial(replace, replayable=False, replay_refusal=reason)

        def refused(profile: Profile) -> Profile:
            calls = (note(each) if each.module == module else each for each in profile.calls)
            return replace(profile, calls=tuple(calls))

        self.profiles = self._measured.changed(refused)

    def begin(
        self, profiles: Profiles, budget_bytes: int, weigh: Weigh = lambda profiles, _: profiles
    ) -> Plan:
        """Return the first plan of new profiles, and set ``first``, the plan of the next step.

        ``weigh`` takes the profiles and a quick plan; it returns the profiles, with sensitivities
        if the plan needs them. Raises BudgetError, with the least budget, if no plan fits.
        """
        self.profiles, self.evidence = profiles, None
        is_to_weigh = not profiles.own.weights and self.constraints.tolerance != 0
        quick = self._quick(budget_bytes, is_to_weigh=is_to_weigh)
        if budget_bytes < self.loaded_bytes:
            raise self._refusal(budget_bytes, quick.predicted_peak_bytes, is_to_weigh=is_to_weigh)
        self.profiles = weigh(profiles, quick)
        is_weighed = self.profiles.own is not profiles.own
        self.plan = self._make(budget_bytes, None if is_weighed else quick)
        if self._search is not None:
            self.plan = self._searched(self.plan, budget_bytes)
        # Named levels and policies run as asked from the first step on.
        if self.plan.return_freed_blocks and self.can_fuse:
            self.first = self._first_plan(self.plan, budget_bytes)
        return self.plan

    def regrow(self, profiles: Profiles, budget_bytes: int) -> None:
        """Plan for a larger batch, corrected by steps' peaks as before; BudgetError: none fits."""
        before, self.profiles = self.profiles, profiles
        try:
            plan = self._make(budget_bytes)
        except BudgetError:
            self.profiles = before
            raise
        self.autotuner.forget()
        self.plan, self.first = plan, None

    def _first_plan(self, plan: Plan, budget_bytes: int) -> Plan | None:
        profile = self._measured.of(plan)
        first = planner.first_plan(profile, plan, budget_bytes, self.constraints)
        if first is None:
            return None
        before_update = first.predicted_peak_bytes - profile.optimizer_bytes
        in_update = planner.update_peak_bytes(profile, release=first.release_gradients)
        return replace(first, predicted_peak_bytes=max(before_update, in_update))

    def correct(self, measured_peak_bytes: int, budget_bytes: int | None) -> None:
        """Go on with the plan, corrected by the peak of the first full-size step.

        ``budget_bytes``: None if it moved meanwhile; then the next step is planned anew. If no plan
        is predicted to fit any more, that step's goes on; BudgetError: it did not fit either.
        """
        first, self.first = self.first, None
        if first is None or budget_bytes is None:
            return
        measured_peak_bytes -= SEARCH_BYTES if self._search else 0  # which ran beside the step
        self.evidence = PeakMeasurement(first.predicted_peak_bytes, measured_peak_bytes)
        if self._factor > 1.0:
            try:
                self.plan = self._make(budget_bytes)
            except BudgetError:
                self.settle_on(first)
                if measured_peak_bytes > budget_bytes:
                    raise

    def _searched(self, quick: Plan, budget_bytes: int) -> Plan:
        """Wait for the best plan with patience; the search goes on if steps leave it room."""
        assert self._search is not None
        if self._has_room_to_search(quick, budget_bytes):
            self._search.wait(PATIENCE_S)
        else:
            self._search.finish(PATIENCE_S)
        return self._taken_over() or quick

    def _taken_over(self) -> Plan | None:
        search = self._search
        if search is None or not search.is_done:
            return None
        self._search = None
        if search is self._by_numbers:
            self.reweighed_ms, self._by_numbers = self.reweighed_ms + search.took_ms, None
        self.autotuner.offer(search.result)
        return search.result[0] if search.result else None

    @staticmethod
    def _has_room_to_search(plan: Plan, budget_bytes: int) -> bool:
        return budget_bytes - plan.predicted_peak_bytes >= SEARCH_BYTES

    def between_steps(self) -> None:
        """Take over the best plan once it is found, or the next plan to try."""
        self.plan = self._taken_over() or self.plan
        if self.first is None and self._search is None:
            self.plan = self.autotuner.next_plan() or self.plan

    def note_step(self, plan: Plan, ran: StepMeasurement, share: float) -> None:
        """Take in a step, as ``PlanAutotuner.note``; after a trial the fastest plan stays."""
        self.plan = self.autotuner.note(plan, ran, share) or self.plan

    def again(self, budget_bytes: int, *, can_refuse: bool) -> Plan:
        """Return the plan under another budget.

        If none is predicted to fit but allocations over budget are refused (``can_refuse``), return
        the plan that holds least, else raise BudgetError.
        """
        self.first = None
        try:
            self.plan = self._make(budget_bytes)
        except BudgetError as error:
            if not can_refuse or error.least_bytes is None:
                raise
            self.plan = self._quick(error.least_bytes)  # others hold more
        if self._search and not self._has_room_to_search(self.plan, budget_bytes):
            self.plan = self._searched(self.plan, budget_bytes)
        return self.plan

    def reweigh(self, profiles: Profiles, budget_bytes: int) -> None:
        """Plan anew with newer sensitivities: in tolerance, else nearest to it, else not at all."""
        self.profiles, tolerance = profiles, self.constraints.tolerance
        try:
            self.plan = self._make(budget_bytes)
        except BudgetError:
            if isinstance(tolerance, float):
                self._aim_for(tolerance, budget_bytes)
        self._by_numbers = self._search

    def _aim_for(self, tolerance: float, budget_bytes: int) -> None:
        """Plan anew within this tolerance if the budget allows, else with the least noise."""
        wider = (each for each in WIDER_TOLERANCES if each > tolerance)
        self.constraints = replace(self.constraints, tolerance=(tolerance, *wider, math.inf))
        with suppress(BudgetError):
            self.plan = self._make(budget_bytes)

    def widen(self, tolerance: float, budget_bytes: int) -> bool:
        """Widen codes, to this tolerance if that fits; False if no wider ones fit."""
        before, constraints = self.plan, self.constraints
        assert before is not None
        if (level := wider_level(constraints.policy)) is not None:
            self.constraints = replace(constraints, policy=level)
            with suppress(BudgetError):
                self.plan = self._make(budget_bytes)
        else:
            self._aim_for(tolerance, budget_bytes)
        if self.plan is not None and self.plan.added_noise < before.added_noise:
            return True
        self.give_up_search()
        self.plan, self.constraints = before, constraints
        return False

    def tighten(self, plan: Plan) -> Plan | None:
        """Go on with a plan (tried ones first) that holds less than ``plan``; None without one."""
        if (proven := self.autotuner.drop(plan)) is not None:
            self.plan = proven
            return proven
        held = replace(plan, predicted_peak_bytes=self.modelled(plan.predicted_peak_bytes))
        tighter = planner.tighter_plan(self._planned, held, self.constraints)
        if tighter is not None:
            tighter = self._corrected(tighter)
            self.settle_on(tighter)
            self.autotuner.may_try = False  # others may exceed their predicted bytes too
        return tighter

    def search_again(self, budget_bytes: int) -> None:
        """Restart the search that ran when a resumed session's state was taken."""
        make = self._maker(budget_bytes)
        self._search = BackgroundPlan(lambda stop: make(stop=stop))

    def least_bytes(self, *, weighed: bool = True) -> int:
        """Return the least budget of any plan; ``weighed`` False ignores sensitivities."""
        profiles = self._planned
        if not weighed:
            profiles = tuple(replace(p, weights={}, noise_per_weight=0.0) for p in profiles)
        return self._named_least(planner.least_feasible_budget(profiles, self.constraints))

    def left_alone(self) -> list[LeverRefusal]:
        """Return what no plan does because nothing has proven it, computed once per profile."""
        if self._left_alone is None or self._left_alone[0] is not self.profiles:
            least = partial(planner.least_feasible_budget, constraints=self.constraints)
            found = left_alone(self._planned, least) + self._unreleased()
            self._left_alone = self._measured, found
        return [*self._left_alone[1]]

    def _unreleased(self) -> list[LeverRefusal]:
        allowed = self.constraints.allowed
        if not allowed.release_refusal:
            return []
        constraints = replace(self.constraints, allowed=replace(allowed, release_gradients=True))
        saved_bytes = None
        with suppress(BudgetError):
            least = partial(planner.least_feasible_budget, self._planned)
            saved_bytes = max(0, least(self.constraints) - least(constraints))
        return [LeverRefusal("release", (), allowed.release_refusal, saved_bytes)]

    def state_dict(self) -> dict[str, Any]:
        tolerance = self.constraints.tolerance
        return super().state_dict() | {
            "autotuner": self.autotuner.state_dict(),
            "was_searching": self._search is not None,
            "tolerances": list(tolerance) if isinstance(tolerance, tuple) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``, without the search that ran (``search_again``)."""
        self.give_up_search()
        super().load_state_dict(state)
        self.autotuner.load_state_dict(state["autotuner"])
        if state["tolerances"] is not None:
            self.constraints = replace(self.constraints, tolerance=tuple(state["tolerances"]))

    @property
    def _measured(self) -> Profiles:
        assert self.profiles is not None
        return self.profiles

    @property
    def _planned(self) -> tuple[Profile, ...]:
        return self._measured.every if self.can_fuse else (self._measured.own,)

    def _maker(self, budget_bytes: int) -> Callable[..., tuple[Plan, ...]]:
        bytes_modelled = self.modelled(budget_bytes)
        make = partial(planner.make_plans, self._planned, bytes_modelled, self.constraints)

        def corrected(*, quickly: bool = False, **options: Any) -> tuple[Plan, ...]:
            options |= {"quickly": quickly, "with_others": self.can_fuse and not quickly}
            found = map(self._corrected, make(**options))
            best: dict[PlanKind, Plan] = {}
            for plan in sorted(found, key=lambda plan: plan.predicted_step_ms):
                best.setdefault(plan_kind(plan), plan)
            return tuple(best.values())

        return corrected

    def _quick(self, budget_bytes: int, *, is_to_weigh: bool = False) -> Plan:
        try:
            return self._maker(budget_bytes)(quickly=True)[0]
        except BudgetError as error:
            if error.least_bytes is None:
                raise
            least = error.least_bytes
            raise self._refusal(budget_bytes, least, is_to_weigh=is_to_weigh) from error

    def _refusal(self, budget_bytes: int, modelled_bytes: int, *, is_to_weigh: bool) -> BudgetError:
        least = self._named_least(modelled_bytes, is_to_weigh=is_to_weigh)
        return BudgetError(planner.refusal(self._measured.own, budget_bytes, least), least)

    def _make(self, budget_bytes: int, quick: Plan | None = None) -> Plan:
        """Return a quick plan now; search for the best one in the background."""
        self._end_search()
        plan = quick or self._quick(budget_bytes)
        # Nothing is faster than the whole batch unchanged.
        is_plain = plan.policy.name == "plain" and plan.micro_batch >= self._measured.own.batch_size
        if self.can_fuse and not is_plain:
            self.search_again(budget_bytes)
        return plan

    @property
    def _factor(self) -> float:
        if self.evidence is None or self.profiles is None:
            return 1.0
        return self.evidence.factor(self._measured.own.floor_bytes)

    def _named_least(self, modelled_bytes: int, *, is_to_weigh: bool = False) -> int:
        """Return the least budget to tell of: what is modelled, and what another process adds."""
        own, least = self._measured.own, self._actual(modelled_bytes)
        timed = [examples for examples, _ in own.micro_batch_ms]
        is_short = is_to_weigh or own.proof_bytes > 0 or len(timed) == 1
        has_more_room = is_short and not own.weights  # measured sensitivities have left theirs
        if own.split_refusal == NO_ROOM_TO_PROVE:  # with that room the batch would be cut
            # What it takes whole is known by steps too small to tell.
            cut = [replace(each, split_refusal="") for each in self._planned]
            least = self._actual(planner.least_feasible_budget(cut, self.constraints))
        elif own.split_refusal and len(timed) == 1 and timed[0] < probe_sizes(own.batch_size)[-1]:
            least += THREAD_BYTES * torch.get_num_threads()
            least += int(FEW_EXAMPLES_SHARE * (modelled_bytes - own.floor_bytes))
        least = max(least, own.proof_bytes, self.loaded_bytes) + ANOTHER_PROCESS_BYTES
        return least + (MORE_ROOM_BYTES if has_more_room else 0)

    def modelled(self, budget_bytes: int) -> int:
        """Return a budget (bytes) in the profile's own measure, as evidence has corrected it."""
        floor = self._measured.own.floor_bytes
        return floor + int((budget_bytes - floor) / self._factor)

    def _actual(self, modelled_bytes: int) -> int:
        floor = self._measured.own.floor_bytes
        return floor + int((modelled_bytes - floor) * self._factor) + 1

    def _corrected(self, plan: Plan) -> Plan:
        timed = self.autotuner.corrected(plan)
        if self._factor == 1.0:
            return timed
        return replace(timed, predicted_peak_bytes=self._actual(plan.predicted_peak_bytes))
