"""Builds the parts of a ``Session`` and connects them."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from daf.budget.governor import Governor
from daf.budget.limits import bounds_of
from daf.budget.request import Budget, Scope
from daf.capture.capture import Capture
from daf.core.units import parse_optional_bytes
from daf.memory.domain import MemoryDomain, ProcessMemory, keeper_of
from daf.memory.keeper import Keeper
from daf.memory.owners import owners
from daf.offload.host_codes import host_options
from daf.offload.spill import SpillOptions
from daf.planning.planner import Constraints
from daf.pool.paged_pool import make_store
from daf.profiling.profiler import Profiler
from daf.sensitivity.result import Sensitivity
from daf.sensitivity.tracker import SensitivityTracker
from daf.session import arguments as asked
from daf.session.budget_controller import BudgetController
from daf.session.counters import StepCounters
from daf.session.noise_controller import NoiseController
from daf.session.plan_controller import PlanController
from daf.session.plan_selector import PlanSelector
from daf.session.rollback import Rollback
from daf.session.step_profiles import StepProfiles
from daf.session.step_runner import StepRetries, StepRunner
from daf.session.users_updates import UsersUpdates
from daf.step.gradient import GradientStep
from daf.step.gradient_release import GradientRelease, ReleaseMode
from daf.step.user_gradients import UserGradients


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
    pool_bytes: str | int | None = None,
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
    store = make_store(parse_optional_bytes(pool_bytes))
    capture = Capture(model, store, spill, host, can_run_again=can_run_again)
    keeper = keeper_of(memory, store.give_back, capture.devices.give_back)
    release = GradientRelease(release_gradients, model, optimizer, capture.parameter_reads)
    gradient = GradientStep(model, optimizer, capture, release, keeper)
    tolerance = asked.checked_tolerance(tolerance)
    name = asked.policy_name(bits, policy, has_budget=has_budget)
    selector = PlanSelector(Constraints(name, tolerance))
    tracker = SensitivityTracker(model, optimizer, keeper, sensitivity)
    noise = NoiseController(tracker, selector, capture, tolerance, memory)
    counters = StepCounters(capture, memory, release)
    governor = Governor(budget, bounds=bounds_of(memory), scope=asked.checked_scope(scope, memory))
    budget_controller = BudgetController(governor, keeper, capture.release_scratch)
    make_profiler = partial(
        Profiler,
        model,
        optimizer,
        capture,
        memory,
        keeper,
        baseline_bytes=baseline_bytes,
        allow_split=allow_batchnorm_split,
        spill=spill,
        begin_peak=counters.begin_peak,
    )
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
    users = UserGradients(model, optimizer)
    retries = StepRetries(gradient, optimizer, capture, keeper, plan_controller, users)
    going_back = Rollback(model, optimizer, rollback)
    runner = StepRunner(optimizer, retries, plan_controller, noise, going_back, counters, keeper)
    return SessionParts(
        capture,
        keeper,
        budget_controller,
        plan_controller,
        noise,
        gradient,
        runner,
        UsersUpdates(model, runner),
    )
