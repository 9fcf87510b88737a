"""One training step inside a byte budget: profile, plan, execute, adapt.

``Session`` measures a few small steps, lets the planner choose, runs the first
full-size step under the tightest plan, measures that, and goes on with the
fastest plan that fits (``controller``: which plan; here: running the step).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from daf import budget as governor
from daf.capture.capture import Capture
from daf.core.errors import DivergedError, NonFiniteLossError
from daf.core.plan import Plan
from daf.core.policy import Method
from daf.core.profile import Profile
from daf.core.step_report import StepReport
from daf.core.units import parse_optional_bytes
from daf.memory.domain import ProcessMemory, keeper_of
from daf.offload.host_codes import host_options
from daf.offload.spill import SpillOptions
from daf.planning.bit_widths import is_lossy
from daf.planning.options import Allowed
from daf.pool.default import make_store
from daf.profiling.model_memory import parameter_bytes
from daf.profiling.profiler import Profiler
from daf.sensitivity.monitors import NoiseRecord
from daf.sensitivity.result import Sensitivity
from daf.session.arguments import (
    asked_memory,
    checked_tolerance,
    fixed_policy,
    passing_bytes,
    policy_name,
    refuse_budget_elsewhere,
    refuse_what_sends_nothing,
)
from daf.session.budget_controller import BudgetChange, BudgetController
from daf.session.counters import StepCounters
from daf.session.noise_controller import NoiseController
from daf.session.plan_autotuner import StepMeasurement
from daf.session.plan_controller import PlanController, PlanMeans
from daf.session.plan_selector import PlanConstraints, PlanSelector
from daf.session.rollback import Rollback
from daf.session.sensitivity_tracker import SensitivityTracker
from daf.session.step_profiles import StepProfiles
from daf.session.step_retries import Replanning, StepRetries
from daf.step.gradient import Before, GradientStep
from daf.step.gradient_release import GradientRelease, ReleaseMode, release_refusal
from daf.step.microbatch import LossFunction, batch_size
from daf.torch_compat import compiler


class Session:
    """Trains a model within a budget of bytes.

    Of a model on the processor the budget bounds the whole process; of one on a GPU, what
    PyTorch reserves there (``memory.device``). Peaks are told of the same memory.

    Args:
        model: any ``nn.Module`` on one device.
        optimizer: any ``torch.optim.Optimizer`` over its parameters.
        budget: of all that is held there, its floor included: bytes as ``"700MB"`` or an int, a
            fraction of the machine as 0.5 or ``"50%"``, ``"auto"`` for what the machine can
            spare, or a function that returns one of these and is called every 20 ms; None
            trains without a limit. ``session.budget`` may be set at any moment, in mid-step
            and from another thread too. Tighter limits of the system (memory cgroups, free
            memory, ulimits) come first and are followed while it trains.
        bits: the same at every site (1 … 8, ``"exact"``, ``"plain"``); None lets the
            planner choose. Without a budget None means ``"plain"``.
        fused: without a budget, run normalisations with what follows them, GELU and SiLU as
            operators that read their code directly, and large convolutions and linear layers
            in chunks, wherever that was seen to be the same (``compress``). Under a budget the
            planner fuses where that pays.
        policy: how the planner chooses under a budget: ``"optimal"``, or to compare with it
            ``"sage"``, ``"checkpoint"``, ``"accumulate"``, ``"reduce"``, ``"quantize"``
            (``planning.policies``).
        tolerance: the most variance that codes may add to the gradient, relative to the
            batch's own (0: only what is exact). None: a seventh, and where that cannot hold
            the budget, as much as it takes. Until the two were measured, two bits
            everywhere are taken to add a seventh.
        seed: names the run in the codes' random rotations.
        baseline_bytes: the process before the model existed; by default the
            resident size now, less the model.
        allow_batchnorm_split: permit micro-batches although batch statistics
            then change.
        spill: where tensors go whose treatment is *spill* (to disk), and how much of them.
        host_bytes: of a model on a GPU, how much pinned host memory its codes may wait in, as bytes
            or ``"4GB"``: they leave the GPU beside the computation, packed there or by the
            processor as measured rates say, and come back before backward wants them. Under a
            budget the planner sends what pays, without one all codes go. None: none.
        pool_bytes: the most that codes may hold, the process's and each GPU's for themselves, as
            bytes or ``"200MB"``; None: no cap of their own. Below what they need, planes of
            ``rotated`` codes are given up, the least important first, down to one bit; reports
            say how much. The attribute may be changed at any moment, in mid-step and from another
            thread too.
        sensitivity: measure what each site's code adds to the gradient, and plan by that
            (True: after the first plan, then whenever 2 % of the training time has been
            earned); False never does. Or what an earlier run of this model found.
        rollback: when the losses say that the run diverges under its codes (inf, NaN, or far above
            the usual ones again and again), go back to the last good state with wider codes,
            once; ``StepReport.rolled_back_to`` tells. The state is written to this file
            every 100 steps (True: to a temporary one). The second time it is an error.
        release_gradients: step each parameter inside backward, as its gradient completes, and
            free the gradient (``grad`` is None afterwards): the same result, bit for bit. True
            raises where something needs the gradients later; ``"auto"`` then leaves it, and
            ``release_refusal`` says why. The first update commits the step: refused memory is
            no longer answered by a retry but by giving up codes and, at last, by an overrun.

    Raises:
        ReleaseRefusedError: ``release_gradients`` is True, and the optimizer or model forbid it.
        UnitError: the budget or the pool's bytes cannot be read.
        PoolFullError: ``pool_bytes`` was given, and the system grants no addresses.
        PlatformError: a budget was given for a model on several devices, or on one whose memory
            cannot be bounded; ``host_bytes`` for a model on the processor.
        UnknownNameError: ``policy`` names none.
        ValueError: ``bits`` names no policy, or both were given; a negative tolerance;
            ``fused`` together with a budget; ``host_bytes`` with what would send nothing there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        budget: governor.Budget,
        *,
        bits: int | str | None = None,
        fused: bool = False,
        policy: str | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        baseline_bytes: int | None = None,
        allow_batchnorm_split: bool = False,
        pool_bytes: str | int | None = None,
        release_gradients: ReleaseMode = False,
        spill: SpillOptions | None = None,
        sensitivity: Sensitivity | bool = True,
        rollback: Path | bool = False,
        host_bytes: str | int | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._memory = memory = asked_memory(model, budget)
        self.baseline_bytes = baseline_bytes or max(0, memory.held_bytes() - parameter_bytes(model))
        host, has_budget = host_options(model, host_bytes), budget is not None
        if host is not None:
            refuse_what_sends_nothing(bits, policy, has_budget=has_budget)
        on_host = host is not None
        self._fixed_policy = fixed_policy(bits, fused=fused, has_budget=has_budget, on_host=on_host)
        self._seed = seed
        self._spill = spill
        store = make_store(parse_optional_bytes(pool_bytes))
        self._capture = Capture(model, store, spill, host)
        self._keeper = keeper_of(memory, store.give_back, self._capture.devices.give_back)
        self._release = GradientRelease(
            release_gradients, model, optimizer, self._capture.parameter_reads
        )
        self._gradient = gradient = GradientStep(
            model, optimizer, self._capture, self._release, self._keeper.must_finish
        )
        tolerance = checked_tolerance(tolerance)
        self._plan_selector = PlanSelector(PlanConstraints(policy_name(bits, policy), tolerance))
        known = sensitivity if isinstance(sensitivity, Sensitivity) else None
        tracker = SensitivityTracker(
            model, optimizer, self._keeper, seed, known=known, is_on=bool(sensitivity)
        )
        self._noise = NoiseController(
            tracker, self._plan_selector, self._capture, tolerance, memory
        )
        self._rollback = Rollback(model, optimizer, rollback)
        self._counters = StepCounters(self._capture, memory)
        self._budget_controller = BudgetController(
            budget, self._keeper, self._capture.release_scratch, bounds=governor.bounds_of(memory)
        )
        self._retries = StepRetries(
            gradient, optimizer, self._capture, self._keeper, self._budget_controller
        )
        measured = (model, optimizer, self._capture, memory, self._keeper, self.baseline_bytes)
        profiler = partial(Profiler, *measured, begin_peak=self._counters.begin_peak)
        self._step_profiles = StepProfiles(profiler, allow_split=allow_batchnorm_split, spill=spill)
        means = (
            self._step_profiles,
            self._noise,
            self._keeper,
            self._budget_controller,
            self._allowed,
        )
        self._plan_controller = PlanController(
            model, self._fixed_policy, PlanMeans(memory, self._plan_selector, *means)
        )
        memory.reset_peak()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Undo what was set in the process (see ``settings``), and watch no limits any more."""
        self._plan_selector.give_up_search()
        self._budget_controller.close()
        self._keeper.close()
        self._rollback.close()

    @property
    def budget(self) -> governor.Budget:
        """What was asked; set it at any moment, from any thread: it acts at once.

        A lower budget in mid-step: recycled memory goes back and the pool gives
        up planes before this returns; the step finishes, or is tried again under
        a tighter plan if it needs more. The next step is planned anew.

        Raises:
            UnitError: it is no budget; the one before stays.
        """
        return self._budget_controller.asked

    @budget.setter
    def budget(self, value: governor.Budget) -> None:
        if value is not None:
            refuse_budget_elsewhere(self.model, self._memory)
        self._budget_controller.ask(value)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in force now: what was asked, or less where a limit of the system is tighter.

        Setting it is setting ``budget``.
        """
        return self._budget_controller.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int | None) -> None:
        self.budget = value

    @property
    def budget_history(self) -> list[BudgetChange]:
        """Every budget that was in force, with the reason and what was given up at once."""
        return list(self._budget_controller.history)

    @property
    def settings(self) -> list[str]:
        """What was set in the process for the budget's sake, in words; ``close`` undoes it."""
        return self._keeper.settings

    @property
    def peak_bytes(self) -> int:
        """The highest of the process's memory, or of the model's GPU's, since the session began
        (bytes).
        """
        return self._counters.peak_bytes

    def held_bytes(self) -> int:
        """What the process, or PyTorch on the model's GPU, holds now (bytes)."""
        return self._memory.held_bytes()

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The highest peak that was predicted of a plan; None before ``prepare``."""
        return self._plan_controller.predicted_peak_bytes

    @property
    def saved_bytes_plain(self) -> int:
        """What plain PyTorch would have saved for backward at its peak."""
        return self._counters.saved_bytes_plain

    @property
    def saved_bytes_peak(self) -> int:
        """What was held for backward at the peak instead."""
        return self._counters.saved_bytes_peak

    @property
    def evicted_bytes(self) -> int:
        """Planes of codes that were given up so far."""
        return self._counters.evicted_bytes

    @property
    def pool_bytes(self) -> int | None:
        """The most that codes may hold; setting it acts at once."""
        return self._capture.pool_bytes

    @pool_bytes.setter
    def pool_bytes(self, value: str | int | None) -> None:
        self._capture.pool_bytes = parse_optional_bytes(value)

    @property
    def fusion_refusal(self) -> str:
        """Why PyTorch's operators stay, although fused ones were tried; else empty."""
        return self._step_profiles.fusion_refusal

    @property
    def release_refusal(self) -> str:
        """Why the last step released no gradients although that was asked for; else empty."""
        return self._release.refusal

    @property
    def plan(self) -> Plan | None:
        """What training goes on with; None before ``prepare``."""
        return self._plan_selector.plan

    @plan.setter
    def plan(self, value: Plan | None) -> None:
        self._plan_selector.settle_on(value)

    @property
    def is_settled(self) -> bool:
        """Is the plan one to go on with? Not while a better one is sought, or others are tried."""
        return self.plan is not None and self._plan_selector.is_settled

    @property
    def profile(self) -> Profile | None:
        """What was measured before planning; None before ``prepare`` or without a budget."""
        return self._plan_selector.profile

    def profile_of(self, plan: Plan) -> Profile | None:
        """What was measured of the operators that this plan runs, fused ones or PyTorch's own."""
        return None if self.profile is None else self._plan_selector.profile_of(plan)

    @property
    def sensitivity(self) -> Sensitivity | None:
        """What is known of every site's part in the gradient's noise; for another run's session."""
        return self._noise.tracker.sensitivity

    @property
    def is_measuring(self) -> bool:
        """Does the loss function run now for a measurement, which is no training?"""
        return self._noise.tracker.is_measuring or self._gradient.is_rehearsing

    @property
    def noise(self) -> NoiseController:
        """Measures, and what was found: noise by site, records, time spent."""
        return self._noise

    @property
    def noise_history(self) -> list[NoiseRecord]:
        """What codes added beside the batch's own noise, at every measurement."""
        return list(self._noise.history)

    def prepare(
        self,
        batch: Any,
        loss_fn: LossFunction,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Plan:
        """Profile on this batch and plan; the model, its gradients and random states stay as found.

        Raises:
            BudgetError: no plan fits; ``least_bytes`` is the least budget that would.
        """
        return self._plan_controller.prepare(batch, loss_fn, on_progress)

    def least_feasible_bytes(self) -> int | None:
        """The least budget with which such a session would begin; None before ``prepare``.

        What this one has learnt of sensitivities since does not lower it.
        """
        if self.profile is None:
            return None
        return self._plan_selector.least_bytes(weighed=self._noise.tracker.was_known)

    def step(self, batch: Any, loss_fn: LossFunction) -> StepReport:
        """One training step: gradient of the mean loss over the batch, then the optimizer.

        A batch with more bytes than any before it is profiled and planned for anew.

        Args:
            batch: any nest of tensors whose first dimension is the batch's.
            loss_fn: ``loss_fn(model, batch)`` returns a scalar mean loss, or ``(sum, weight)``.

        Raises:
            BudgetError: the budget cannot hold the step.
            PoolFullError: ``pool_bytes`` cannot hold the codes, and no tighter plan is known.
            NonFiniteLossError: the loss is inf or NaN; parameters and buffers are untouched.
            ReleaseRefusedError: gradients must be released, and something needs them later.
            CommittedStepError: backward failed after parameters had been updated.
            DivergedError: ``rollback`` was asked for, and the run diverges again or codes cannot
                be wider.
        """
        running = self._plan_controller.plan_for(batch, loss_fn)
        self._counters.begin_peak()
        start_s = time.perf_counter()
        loss, running, has_diverged = self._run_watched(batch, loss_fn, running)
        if has_diverged:
            return self._go_back(loss, running, 1000 * (time.perf_counter() - start_s))
        self._update(running)
        if not self.is_settled:
            self._memory.wait()  # plans are compared by whole steps
        step_ms = 1000 * (time.perf_counter() - start_s)
        peak_bytes = self._counters.end_peak()
        self._count(batch, running, step_ms, peak_bytes)
        report = StepReport(
            loss,
            step_ms,
            peak_bytes,
            self._capture.stats.held_peak_bytes,
            running.micro_batch,
            self._capture.stats.evicted_bytes,
            self._release.count.released,
            self._keeper.overrun_bytes,
            self.budget_bytes,
        )
        step = self._counters.step_index - 1, step_ms
        budget_bytes = self._plan_controller.planned_budget_bytes
        noise = self._noise.after_step(batch, loss_fn, running, step, budget_bytes)
        return replace(report, **noise._asdict())

    def _update(self, running: Plan) -> None:
        """The optimizer's part of a step."""
        if running.return_freed_blocks:
            self._capture.release_scratch()
        with self._keeper.unbounded(self._update_bytes()):
            compiler.step(self.optimizer)
            self._rollback.save_if_good()

    def _update_bytes(self) -> int:
        """What the optimizer's part is predicted to take, its state in the first step included."""
        if self.profile is None:
            return 0
        state = 0 if self.optimizer.state else self.profile.optimizer_bytes
        return self.profile.update_bytes + state

    def _count(self, batch: Any, running: Plan, step_ms: float, peak_bytes: int) -> None:
        """What a step that ended took and held, and says of its plan."""
        part = self.plan.micro_batch if self.plan else 1
        self._counters.note_step(batch_size(batch) / part)
        ran = StepMeasurement(step_ms, self._capture.stats.held_peak_bytes)
        self._plan_controller.learn(running, ran, peak_bytes, batch)
        self._counters.note_held(self._plan_selector.autotuner)

    def _run_watched(
        self, batch: Any, loss_fn: LossFunction, plan: Plan
    ) -> tuple[float, Plan, bool]:
        """The loss, the plan that held, and whether the run has gone astray under its codes."""
        try:
            loss, running = self._run(batch, loss_fn, plan)
        except NonFiniteLossError:
            if not self._has_diverged(math.nan, plan):
                raise
            return math.nan, plan, True
        return loss, running, self._has_diverged(loss, running)

    def _has_diverged(self, loss: float, running: Plan) -> bool:
        """Only what codes may have caused is watched: exact runs are the user's own."""
        return is_lossy(running.policy) and self._rollback.note(self._counters.step_index, loss)

    def _go_back(self, loss: float, running: Plan, step_ms: float) -> StepReport:
        """To the last good state, with wider codes.

        Raises:
            DivergedError: the budget has no room for any.
        """
        reason = self._rollback.watch.reason
        if not self._noise.widen(self._plan_controller.planned_budget_bytes):
            raise DivergedError(
                f"{reason}; codes of {running.policy.name} cannot be wider here: raise the budget "
                "or the bits, or lower the learning rate"
            )
        with self._keeper.unbounded():
            step_index = self._counters.step_index = self._rollback.restore()
        self._noise.tell(
            f"{reason}; going back to the state after step {step_index} with wider codes"
        )
        return StepReport(
            loss,
            step_ms,
            self._counters.end_peak(),
            self._capture.stats.held_peak_bytes,
            running.micro_batch,
            budget_bytes=self.budget_bytes,
            rolled_back_to=step_index,
        )

    def explain(self) -> list[dict[str, Any]]:
        """One row per site of the last captured step: site, need, treatment, bytes."""
        return [report.as_dict() for report in self._capture.sites()]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as this one would have (JSON-able)."""
        counted = self._counters.state_dict() | self._plan_controller.state_dict()
        noise = {"noise": self._noise.state_dict(), "rollback": self._rollback.state_dict()}
        return self._plan_selector.state_dict() | counted | noise | {"seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``: nothing is measured again; a search begins anew."""
        self._plan_selector.load_state_dict(state)
        plan = self._plan_selector.plan
        if self._capture.host is None and plan is not None and plan.policy.on_host:
            raise ValueError(
                "asked to go on with a plan whose codes wait in host memory, in a session without; "
                "give host_bytes as the session had that made the plan"
            )
        self._seed = state["seed"]
        self._counters.load_state_dict(state)
        self._noise.load_state_dict(state["noise"])
        self._rollback.load_state_dict(state["rollback"])
        self._plan_controller.load_state_dict(state)

    def _allowed(self) -> Allowed:
        """What this session's execution can carry out."""
        host = self._capture.host
        can_spill = self._spill is not None and isinstance(self._memory, ProcessMemory)
        without = frozenset() if can_spill else frozenset({Method.SPILL})
        passing = self._bound_passing()
        can_release = self._release.is_asked and not release_refusal(self.model, self.optimizer)
        return Allowed(
            methods=frozenset(Method) - without,
            release_gradients=can_release,
            must_release=can_release and self._release.is_demanded,
            host_bytes=0 if host is None else host.limit_bytes,
            passing_bytes=passing,
        )

    def _bound_passing(self) -> int:
        """What codes may take of a device's budget on their way to the host and back."""
        host, budget_bytes = self._capture.host, self.budget_bytes
        if host is None or budget_bytes is None:
            return 0
        share = passing_bytes(budget_bytes)
        host.allow(staging_bytes=share // 2, raw_bytes=share // 2)
        return share

    def _run(self, batch: Any, loss_fn: LossFunction, plan: Plan) -> tuple[float, Plan]:
        key, before = (self._seed, self._counters.step_index), Before(self.model)
        answers = Replanning(self._plan_controller.tighter, self._plan_controller.refusal)
        replanning = None if self.profile is None else answers
        return self._retries.run(batch, loss_fn, plan, key, before, replanning)
