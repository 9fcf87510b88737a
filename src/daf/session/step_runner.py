"""Runs one training step: gradient, optimizer, learning; retried while memory is refused."""

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils import clip_grad_norm_

from daf.capture.capture import Capture
from daf.core import errors
from daf.core.plan import Plan
from daf.core.replaced import replaced
from daf.core.step_report import StepReport
from daf.memory.keeper import Keeper
from daf.planning.bit_widths import is_lossy
from daf.profiling.model_memory import optimizer_bytes_to_come, update_bytes
from daf.recompute.python_state import Surroundings
from daf.session.counters import StepCounters
from daf.session.noise_controller import NoiseController
from daf.session.plan_autotuner import StepMeasurement
from daf.session.plan_controller import PlanController
from daf.session.rollback import Rollback
from daf.step.context import StepContext
from daf.step.gradient import GradientStep
from daf.step.gradient_release import CLIPPED, LEFT_TO_USER
from daf.step.state_snapshot import StepSnapshot
from daf.step.user_gradients import UserGradients
from daf.torch_compat import compiler
from daf.torch_compat.compiler import eagerly
from daf.torch_compat.out_of_memory import out_of_memory
from daf.torch_compat.pytree import tensors_in_batch

_Refusal = TypeVar("_Refusal", bound=Exception)
# What deferred results may cause: no second derivative, or NaN that native code read unseen.
_BY_DEFERRING = (errors.DoubleBackwardError, errors.NonFiniteLossError)
MOST_CHANCES = 3  # of one plan in a step, while its budget falls and rises again


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a step takes after its first update: ``needed_bytes``, in updates too."""

    plan: Plan
    batch_bytes: int
    needed_bytes: int

    def covers(self, context: StepContext, plan: Plan) -> bool:
        """True for a step of this plan and a batch that is no larger."""
        return context.info.nbytes <= self.batch_bytes and plan == self.plan


@dataclass(eq=False)
class StepRetries:
    """Computes one session's gradients, under tighter plans while memory is refused."""

    gradient: GradientStep
    optimizer: torch.optim.Optimizer
    capture: Capture
    keeper: Keeper
    plan_controller: PlanController
    users: UserGradients
    rehearsal_ms: float = 0.0  # of the last step
    _rehearsed: Rehearsal | None = None

    def run(self, context: StepContext, plan: Plan) -> tuple[float, Plan]:
        """Return the mean loss, and the plan that held; ``plan`` is tried first.

        Gradients that the user accumulated are added to.

        Raises:
            BudgetError: no plan holds the step.
            CommittedStepError: it failed after parameters had changed.
            PoolFullError: the pool's bytes do not hold it.
            RuntimeError: whatever else the step raised.
        """
        self.rehearsal_ms = 0.0
        leaves = self.gradient.release.kept_because == LEFT_TO_USER
        around = Surroundings.of(self.capture.model, context.loss_fn)
        given = [e for e in tensors_in_batch(context.batch) if e.requires_grad and e.is_leaf]
        others = [*around.parameters_elsewhere(), *given]
        with self.users.set_aside(around.parameters, others, leaves_to_user=leaves):
            snapshot = StepSnapshot(around)
            del around  # what the step replaces is freed as without this
            return self._run(context, plan, snapshot)

    def _run(self, context: StepContext, plan: Plan, snapshot: StepSnapshot) -> tuple[float, Plan]:
        is_planned = self.plan_controller.is_planned
        fallen_back = len(self.capture.fallen_back())
        chances = MOST_CHANCES
        while True:
            refusals = self.keeper.refusals()
            self.capture.spill.bound(self.plan_controller.budget_controller.bound(plan))
            try:
                found = self._attempt(context, plan, snapshot, planned=is_planned)
            except (KeyboardInterrupt, SystemExit):
                if not self.gradient.release.committed:
                    self._clear_away(snapshot)
                raise
            finally:
                self.capture.spill.bound(None)
            if isinstance(found, float):
                return found, plan
            self._clear_away(snapshot)
            if found is None:
                continue  # it is rehearsed
            snapshot.check_parameters()
            if isinstance(found, errors.OtherPathError):
                plan = self.plan_controller.prove_again(context, plan, found)
                continue
            if isinstance(found, errors.SplitError):
                plan = self.plan_controller.stop_splitting(context, str(found))
                continue
            if isinstance(found, errors.ReplayError):
                plan = self.plan_controller.stop_replaying(found)
                continue
            if isinstance(found, (errors.FusionError, *_BY_DEFERRING)):
                fallen_back, before = len(self.capture.fallen_back()), fallen_back
                if fallen_back == before:
                    raise found
                continue  # the place runs otherwise from now on
            if chances and self.plan_controller.has_room_again(plan):
                chances -= 1
                continue
            is_capped = (
                isinstance(found, errors.PoolFullError) and self.keeper.refusals() == refusals
            )
            tighter = self.plan_controller.tighter(plan) if is_planned else None
            if tighter is None:
                refusal = self.plan_controller.refusal()
                if not is_planned or refusal is None or is_capped:
                    raise found
                raise refusal from found
            plan = tighter

    def _attempt(
        self, context: StepContext, plan: Plan, snapshot: StepSnapshot, *, planned: bool
    ) -> float | MemoryError | RuntimeError | errors.SplitError | errors.NonFiniteLossError | None:
        """Return the loss, or the error that another plan can mend, or operators that learned.

        None: this was a rehearsal of a step that will release gradients.

        Any other error is raised.
        """
        refusals = self.keeper.refusals()
        try:
            needed_bytes = 0
            releases = plan.release_gradients or self.gradient.release.mode is True
            # Such a step may commit itself within backward, where room can be reserved for it.
            if planned and releases and self.keeper.can_reserve:
                if self._rehearsed is None or not self._rehearsed.covers(context, plan):
                    self._rehearsed = self._rehearse(context, plan, snapshot)
                    return None
                needed_bytes = self._rehearsed.needed_bytes
            with eagerly():  # once for all passes
                return self.gradient.run(
                    context, plan, snapshot, planned=planned, needed_bytes=needed_bytes
                )
        except (errors.PoolFullError, errors.SplitError, errors.FusionError) as error:
            return _bare(error)
        except errors.ReplayError as error:
            if not self.plan_controller.may_stop_replaying(error.module):
                raise
            return _bare(error)
        except _BY_DEFERRING as error:
            if not self.capture.stop_deferring(f"a step that deferred it failed: {error}"):
                raise
            return _bare(error)
        except errors.BudgetError:
            raise
        except (RuntimeError, MemoryError) as error:  # MemoryError: of NumPy's
            if not self.keeper.has_refused(error, refusals):
                raise
            return _bare(error)

    def _rehearse(self, context: StepContext, plan: Plan, snapshot: StepSnapshot) -> Rehearsal:
        start_s = time.perf_counter()
        updates_bytes = self.plan_controller.update_bytes(has_state=True)
        has_state = bool(self.optimizer.state)
        state_bytes = self.plan_controller.update_bytes(has_state=has_state) - updates_bytes
        found = self.gradient.rehearse(context, plan, snapshot, state_bytes)
        self.rehearsal_ms += 1000 * (time.perf_counter() - start_s)
        return Rehearsal(plan, context.info.nbytes, found + updates_bytes)

    def _clear_away(self, snapshot: StepSnapshot) -> None:
        """Free all of a refused step: a tighter plan needs the room, and so does planning."""
        self.users.clear()
        snapshot.forget_backward()
        self.capture.wait_until_packed()
        self.capture.release_scratch()
        gc.collect()  # a failed step's frames and graph can be parts of cycles
        self.keeper.flush()
        snapshot.restore()


@dataclass(eq=False)
class StepRunner:
    """Runs one session's steps."""

    optimizer: torch.optim.Optimizer
    retries: StepRetries
    plan_controller: PlanController
    noise: NoiseController
    rollback: Rollback
    counters: StepCounters
    keeper: Keeper
    is_updating: bool = False
    passing_bytes: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)

    def run(
        self, context: StepContext, max_grad_norm: float | None = None, *, updates: bool = True
    ) -> StepReport:
        """Run one step, up to its update unless that is made; raises as ``Session.step``."""
        kept_because = "" if max_grad_norm is None else CLIPPED
        self.retries.gradient.release.kept_because = kept_because if updates else LEFT_TO_USER
        self.plan_controller.note_accumulated(self.retries.users.nbytes())
        running = self.plan_controller.plan_for(context)
        self.counters.begin_peak()
        overdraft_bytes = self.keeper.overdraft_bytes
        start_s = time.perf_counter()
        loss, running, has_diverged = self._run_watched(context, running)
        if has_diverged:
            return self._go_back(loss, running, 1000 * (time.perf_counter() - start_s))
        norm = self.clip(max_grad_norm) if updates else None
        if updates:
            self._refuse_other_parameters()
            with self._updating(self._needed_bytes(self.optimizer)):
                compiler.step(self.optimizer)
            self.retries.users.note_updated()
        if not self.plan_controller.selector.is_settled:
            self.counters.memory.wait()  # plans are compared by whole steps
        step_ms = 1000 * (time.perf_counter() - start_s) - self.retries.rehearsal_ms
        peak_bytes = self.counters.end_peak()
        self._learn(context, running, step_ms, peak_bytes, updates=updates)
        overrun_bytes, budget_bytes = self.keeper.overrun_bytes, self.plan_controller.budget_bytes
        planned_bytes = self.plan_controller.planned_budget_bytes
        noise = self.noise.after_step(context, running, step_ms, planned_bytes)
        return self.counters.report(
            loss,
            step_ms,
            running,
            peak_bytes,
            gradient_norm=norm,
            overrun_bytes=overrun_bytes,
            overdraft_bytes=self.keeper.overdraft_bytes - overdraft_bytes,
            budget_bytes=budget_bytes,
            **noise,
        )

    def _refuse_other_parameters(self) -> None:
        """Raise OptionError if the first update would change nothing: it is of another model."""
        kind, groups = type(self.optimizer), self.optimizer.param_groups
        is_checked = self.counters.step_index == 0 and kind.__module__.startswith("torch.")
        has_any = any(each.grad is not None for group in groups for each in group["params"])
        if is_checked and not (has_any or self.retries.gradient.release.committed):
            asked = f"asked {kind.__name__} to update parameters to which the loss does not lead"
            raise errors.OptionError(f"{asked}; make the optimizer over this model's")

    def _run_watched(self, context: StepContext, plan: Plan) -> tuple[float, Plan, bool]:
        """Return the loss, the plan that held, and True if the run has diverged under its codes."""
        try:
            loss, running = self.retries.run(context, plan)
        except errors.NonFiniteLossError:
            if not self._has_diverged(math.nan, plan):
                raise
            return math.nan, plan, True
        # One that is not finite here was scaled: that is its scaler's business.
        return loss, running, math.isfinite(loss) and self._has_diverged(loss, running)

    def _has_diverged(self, loss: float, running: Plan) -> bool:
        """Watch only runs under lossy codes: exact runs are the user's own."""
        return is_lossy(running.policy) and self.rollback.note(self.counters.step_index, loss)

    def update(self, max_grad_norm: float | None = None) -> float | None:
        """Update the parameters by the gradients that they have; ``Session.update`` says more."""
        norm = self.clip(max_grad_norm)
        with self.users_update(self.optimizer):
            compiler.step(self.optimizer)
        self.retries.users.note_left()
        return norm

    @contextmanager
    def users_update(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Bound an update by any optimizer of the user's, or raise BudgetError before it."""
        needed_bytes = self._needed_bytes(optimizer)
        self._reserve(needed_bytes)
        with self._updating(needed_bytes):
            yield

    def _reserve(self, needed_bytes: int) -> None:
        """Make room for an update, or raise before it began."""
        if self.plan_controller.budget_bytes is None:
            return
        self.retries.capture.release_scratch()
        with self.refusal_told():
            self.keeper.reserve(needed_bytes)

    @contextmanager
    def refusal_told(self) -> Iterator[None]:
        """Raise an allocation that is refused inside as BudgetError."""
        refusals = self.keeper.refusals()
        try:
            yield
        except RuntimeError as error:
            is_told = isinstance(error, errors.BudgetError)
            refusal = None if is_told else self.plan_controller.refusal()
            if refusal is None or not self.keeper.has_refused(error, refusals):
                raise
            raise out_of_memory(refusal, self.keeper.memory_name) from error

    def _needed_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the bytes of an update: as profiled, or of another optimizer by trials."""
        if optimizer is self.optimizer:
            return self.plan_controller.update_bytes(has_state=bool(optimizer.state))
        if self.plan_controller.budget_bytes is None:
            return 0
        if optimizer not in self.passing_bytes:
            self.passing_bytes[optimizer] = update_bytes(optimizer, self.counters.memory)
        return self.passing_bytes[optimizer] + optimizer_bytes_to_come(optimizer)

    @contextmanager
    def _updating(self, needed_bytes: int) -> Iterator[None]:
        plan = self.plan_controller.selector.plan
        if plan is None or plan.return_freed_blocks:
            self.retries.capture.release_scratch()
        with replaced(self, is_updating=True), self.keeper.unbounded(needed_bytes):
            yield
            self.rollback.save_if_good()

    def clip(self, max_grad_norm: float | None) -> float | None:
        """Clip the gradient, as ``Session.step`` says; return the norm before, if asked to."""
        if max_grad_norm is None:
            return None
        return float(clip_grad_norm_(self.retries.capture.model.parameters(), max_grad_norm))

    def _learn(
        self, context: StepContext, running: Plan, step_ms: float, peak_bytes: int, *, updates: bool
    ) -> None:
        selector, info = self.plan_controller.selector, context.info
        if not updates and selector.first is not None:  # the update, still to come, may take more
            peak_bytes = max(peak_bytes, selector.first.predicted_peak_bytes)
        part = selector.plan.micro_batch if selector.plan else 1
        self.counters.note_step(info.examples / part)
        ran = StepMeasurement(step_ms, self.counters.step_held_bytes)
        self.plan_controller.learn(running, ran, peak_bytes, info.nbytes)
        self.counters.note_held(selector.autotuner)

    def _go_back(self, loss: float, running: Plan, step_ms: float) -> StepReport:
        """Return to the last good state, with wider codes, or raise DivergedError."""
        reason = self.rollback.watch.reason
        if not self.noise.widen(self.plan_controller.planned_budget_bytes):
            raise errors.DivergedError(
                f"{reason}; codes of {running.policy.name} cannot be wider here: raise the budget "
                "or the bits, or lower the learning rate"
            )
        self.retries.users.clear()  # those that were accumulated are of the state that diverged
        with self.keeper.unbounded():
            step_index = self.counters.step_index = self.rollback.restore()
        self.noise.tell(
            f"{reason}; going back to the state after step {step_index} with wider codes"
        )
        return replace(
            self.counters.report(loss, step_ms, running, self.counters.end_peak()),
            saved_bytes=self.retries.capture.stats.held_peak_bytes,
            evicted_bytes=0,
            released_gradients=0,
            budget_bytes=self.plan_controller.budget_bytes,
            rolled_back_to=step_index,
        )


def _bare(error: _Refusal) -> _Refusal:
    """Strip tracebacks, the causes' too: their frames hold a step's tensors."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
