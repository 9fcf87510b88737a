"""The parts of a session: how they are made, and what can be read of them."""

import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from daf.budget.governor import Governor
from daf.budget.limits import bounds_of
from daf.budget.request import Budget, Scope
from daf.capture.capture import Capture
from daf.core.markup import Markup, element
from daf.core.notebook import card, facts, folded, memory_bar, optional_bytes, parts_of
from daf.core.plan import Plan
from daf.core.profile import Profile
from daf.core.reports import LeverRefusal, SiteReport
from daf.core.units import format_bytes
from daf.memory.domain import MemoryDomain, ProcessMemory, keeper_of
from daf.memory.keeper import Keeper
from daf.memory.owners import owners
from daf.offload.host_codes import host_options
from daf.offload.spill import SpillOptions
from daf.planning.planner import Constraints
from daf.pool.paged_pool import make_store
from daf.pool.store import PoolOptions
from daf.profiling.beside_memory import BesideMemory
from daf.profiling.profiler import Profiler
from daf.sensitivity.result import Sensitivity
from daf.sensitivity.tracker import SensitivityTracker
from daf.session import arguments as asked
from daf.session.budget_controller import BudgetChange, BudgetController
from daf.session.counters import StepCounters
from daf.session.noise_controller import NoiseController, NoiseRecord
from daf.session.plan_controller import PlanController
from daf.session.plan_selector import PlanSelector
from daf.session.rollback import Rollback
from daf.session.step_profiles import StepProfiles
from daf.session.step_runner import StepRetries, StepRunner
from daf.session.users_updates import UsersUpdates
from daf.step.gradient import GradientStep
from daf.step.gradient_release import GradientRelease, ReleaseMode
from daf.torch_compat.modules import Uncopied


class SessionParts(NamedTuple):
    """The collaborators of a session."""

    capture: Capture
    keeper: Keeper
    budget_controller: BudgetController
    plan_controller: PlanController
    noise: NoiseController
    gradient: GradientStep
    runner: StepRunner
    updates: UsersUpdates

    def end_with(self, owner: object) -> None:
        """Set nothing any more once ``owner`` is collected, whoever still looks at its budget."""
        weakref.finalize(owner, self.plan_controller.selector.give_up_search)
        ended = weakref.finalize(owner, self.keeper.retire)
        ended.atexit = False  # what is set ends with a process

    def close(self) -> None:
        """Undo what was set in the process; waits for a step that another thread runs."""
        with owners.turn, ExitStack() as parts:  # each is closed, whatever interrupts another
            parts.callback(self.updates.close)
            parts.callback(self.runner.rollback.close)
            parts.callback(self.keeper.retire)
            parts.callback(self.budget_controller.close)
            parts.callback(self.plan_controller.selector.give_up_search)


def make_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    budget: Budget,
    memory: MemoryDomain,
    *,
    baseline_bytes: int,
    bits: int | str | None = None,
    fused: bool = False,
    policy: str | None = None,
    tolerance: float | None = None,
    allow_batchnorm_split: bool = False,
    operators: str = "auto",
    pool_bytes: PoolOptions | str | int | None = None,
    release_gradients: ReleaseMode = False,
    spill: SpillOptions | None = None,
    sensitivity: Sensitivity | bool = True,
    rollback: str | Path | bool = False,
    host_bytes: str | int | None = None,
    scope: Scope = "process",
    can_run_again: bool = True,
) -> SessionParts:
    """Return a session's parts; arguments and errors are its own; the budget bounds ``memory``."""
    host, has_budget = host_options(model, host_bytes), budget is not None
    if host is not None:
        asked.refuse_what_sends_nothing(bits, policy, has_budget=has_budget)
    fixed = asked.fixed_policy(bits, fused=fused, has_budget=has_budget, on_host=host is not None)
    store = make_store(pool_bytes)
    capture = Capture(model, store, spill, host, can_run_again=can_run_again)
    keeper = keeper_of(memory, store.give_back, capture.devices.give_back)
    release = GradientRelease(release_gradients, model, optimizer, capture.parameter_reads)
    gradient = GradientStep(model, optimizer, capture, release, keeper)
    tolerance = asked.checked_tolerance(tolerance, bits)
    name = asked.policy_name(bits, policy, has_budget=has_budget)
    selector = PlanSelector(Constraints(name, tolerance))
    tracker = SensitivityTracker(model, optimizer, keeper, sensitivity)
    noise = NoiseController(tracker, selector, capture, tolerance, BesideMemory(memory, keeper))
    counters = StepCounters(capture, memory, release)
    governor = Governor(budget, bounds=bounds_of(memory), scope=asked.checked_scope(scope, memory))
    budget_controller = BudgetController(governor, keeper, capture.release_scratch)
    measured = (model, optimizer, capture, memory, keeper, baseline_bytes, allow_batchnorm_split)
    make_profiler = partial(Profiler, *measured, spill, counters.begin_peak)
    can_spill = spill is not None and isinstance(memory, ProcessMemory)
    plan_controller = PlanController(
        selector,
        StepProfiles(model, memory, make_profiler, may_fuse=asked.may_fuse(operators, fused=fused)),
        noise,
        keeper,
        budget_controller,
        allowed=lambda: asked.allowed_treatments(
            capture, release, budget_controller.budget_bytes, can_spill=can_spill
        ),
        fixed_policy=fixed,
    )
    retries = StepRetries(gradient, optimizer, capture, keeper, plan_controller, gradient.users)
    going_back = Rollback(model, optimizer, rollback)
    runner = StepRunner(optimizer, retries, plan_controller, noise, going_back, counters, keeper)
    updates = UsersUpdates(model, runner)
    return SessionParts(
        capture, keeper, budget_controller, plan_controller, noise, gradient, runner, updates
    )


class SessionReadings(Uncopied):
    """The read-only properties of ``Session``."""

    model: nn.Module

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self._capture, self._keeper, self._budget_controller, self._plan_controller = parts[:4]
        self._noise, self._gradient, self._runner, self._updates = parts[4:]

    @property
    def budget_history(self) -> list[BudgetChange]:
        """The last 1,000 budgets in force, with their reasons and the bytes evicted at once."""
        return list(self._budget_controller.history)

    @property
    def settings(self) -> list[str]:
        """What was set in the process for the budget, in words; ``close`` undoes it."""
        return self._keeper.settings

    @property
    def peak_bytes(self) -> int:
        """Highest memory of the process, or of the model's GPU, since the session began."""
        return self._runner.counters.peak_bytes

    def held_bytes(self) -> int:
        """Return the bytes that the process, or PyTorch on the model's GPU, holds now."""
        return self._runner.counters.memory.held_bytes()

    @property
    def saved_bytes_plain(self) -> int:
        """Bytes that plain PyTorch would have saved for backward at its peak."""
        return self._runner.counters.saved_bytes_plain

    @property
    def saved_bytes_peak(self) -> int:
        """Bytes held for backward at the peak instead."""
        return self._runner.counters.saved_bytes_peak

    @property
    def evicted_bytes(self) -> int:
        """Bytes of code planes evicted so far."""
        return self._runner.counters.evicted_bytes

    @property
    def is_settled(self) -> bool:
        """True if the plan is final: no search runs and no other plan is tried."""
        selector = self._plan_controller.selector
        return selector.plan is not None and selector.is_settled

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The highest peak predicted of a plan; None before ``prepare``."""
        return self._plan_controller.predicted_peak_bytes

    def include_loading(self) -> None:
        """Count what loading and measuring held, too: ``prepare`` then takes no lower budget."""
        counters = self._runner.counters
        self._plan_controller.held_before = lambda: max(
            counters.loading_peak_bytes, counters.peak_bytes
        )

    @property
    def profile(self) -> Profile | None:
        """What was measured before planning; None before ``prepare`` or without a budget."""
        profiles = self._plan_controller.selector.profiles
        return None if profiles is None else profiles.own

    def profile_of(self, plan: Plan) -> Profile | None:
        """Return the profile of the operators that this plan runs, fused ones or PyTorch's own."""
        profiles = self._plan_controller.selector.profiles
        return None if profiles is None else profiles.of(plan)

    def least_feasible_bytes(self) -> int | None:
        """Return the least budget of a session that begins like this one; None before planning."""
        if self.profile is None:
            return None
        return self._plan_controller.selector.least_bytes(weighed=self._noise.tracker.was_known)

    @property
    def fusion_refusal(self) -> str:
        """Why PyTorch's operators stay although fused ones were tried; else empty."""
        return self._plan_controller.step_profiles.fusion_refusal

    @property
    def split_refusal(self) -> str:
        """Why batches are not cut into micro-batches; empty if they may be, or before a plan."""
        return "" if self.profile is None else self.profile.split_refusal

    @property
    def proof_ms(self) -> float:
        """Time spent on showing that levers change nothing, so far."""
        return self._plan_controller.step_profiles.proof_ms

    @property
    def release_refusal(self) -> str:
        """Why the last step released no gradients although that was asked for; else empty."""
        return self._gradient.release.refusal

    def sites(self) -> tuple[SiteReport, ...]:
        """Return what was done at each site in the last captured step."""
        return self._capture.sites()

    def left_alone(self) -> list[LeverRefusal]:
        """Return what no plan does because nothing has proven that it changes nothing, and why.

        Empty before ``prepare`` or without a budget. Takes ms: least budgets with and without each.
        """
        if self.profile is None:
            return []
        found = self._plan_controller.selector.left_alone()
        found += [
            LeverRefusal("fusion", (f"{each.module}:{each.operator}",), each.reason, None)
            for each in self._capture.fallen_back()
        ]
        if self.fusion_refusal:
            found.append(LeverRefusal("fusion", (), self.fusion_refusal, None))
        return found

    def explain(self) -> list[dict[str, Any]]:
        """Return a row per site of the last captured step, then one per lever left alone.

        A site's has its need, treatment and bytes; a lever's has its ``reason``, and in
        ``saved_bytes`` by how much the least budget would be lower (None: unknown).
        """
        sites = [each.as_dict() for each in self.sites()]
        return sites + [each.as_site() for each in self.left_alone()]

    @property
    def noise(self) -> NoiseController:
        """The noise controller: noise by site, records, time spent on measuring."""
        return self._noise

    @property
    def noise_history(self) -> list[NoiseRecord]:
        """What codes added beside the batch's own noise, at every measurement."""
        return list(self._noise.history)

    @property
    def sensitivity(self) -> Sensitivity | None:
        """Each site's measured part in the gradient's noise; another session may take it."""
        return self._noise.tracker.sensitivity

    @property
    def is_measuring(self) -> bool:
        """True while the loss function runs for a measurement, not for training."""
        return self._noise.tracker.is_measuring or self._gradient.is_dry_run

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the plan's account within the budget, and what was held."""
        counters, plan = self._runner.counters, self._plan_controller.selector.plan
        budget_bytes = self._budget_controller.budget_bytes
        title = f"{type(self.model).__name__} within {optional_bytes(budget_bytes) or 'no budget'}"
        plain, ours = counters.saved_bytes_plain, counters.saved_bytes_peak
        known = {
            "steps": counters.step_index,
            "peak of the process": format_bytes(self.peak_bytes),
            "predicted": optional_bytes(self.predicted_peak_bytes or None),
            "saved for backward": f"{format_bytes(ours)} (plain PyTorch: {format_bytes(plain)})",
        }
        if plan is None:
            return card(title, facts(known), element("div", "Not planned yet."))
        settled = "settled" if self.is_settled else "others are still tried"
        known |= {"micro-batch": plan.micro_batch, "plan": f"{plan.policy.name} ({settled})"}
        choices = folded(f"{len(plan.choices)} choices", plan.choices)
        bar = memory_bar(parts_of(plan.account), budget_bytes) if plan.account else Markup()
        return card(title, bar, facts(known), choices)
