"""One training step inside a byte budget: profile, plan, execute, adapt.

The only place where planner and execution meet. ``Session`` measures a few
small steps, lets the planner choose, runs the first full-size step under the
tightest plan, measures that, and goes on with the loosest plan that fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from daf import governor, planner
from daf.adapting import Adapting, BudgetChange, Evidence, replan
from daf.errors import BudgetError, NonFiniteLossError, PlatformError, PoolFullError
from daf.execution.capture import Capture
from daf.execution.microbatch import (
    LossFunction,
    WeightedLoss,
    batch_bytes,
    batch_size,
    pieces,
    read_loss,
    scale_gradients,
)
from daf.execution.nonfinite import first_nonfinite
from daf.execution.release import GradientRelease, ReleaseMode
from daf.memory import compiler, measure
from daf.memory.keeper import MemoryKeeper
from daf.memory.recycling import unsupported_reason
from daf.plan import (
    Measurement,
    Plan,
    Policy,
    Profile,
    plain_policy,
    policy_for,
    policy_named,
)
from daf.profiler import Profiler, gradient_bytes, parameter_bytes
from daf.store.default import make_store
from daf.store.spill import SpillOptions
from daf.units import format_bytes, parse_optional_bytes

# A measured small step needs the gradients and about as much again in workspaces and activations.
ROOM_TO_MEASURE = 4
# Measuring again takes seconds; a budget must grow by this much to be worth it.
REPROFILE_GROWTH = 1.1


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did (bytes, milliseconds).

    ``peak_bytes`` is the process's peak during the step; ``evicted_bytes`` of
    codes were given up under the pool's cap or the budget, least important first.
    ``released_gradients`` were stepped and freed inside backward; ``overrun_bytes``
    is what such a step, which cannot be retried, needed beyond the budget to finish.
    ``budget_bytes`` was in force at its end (None: no budget).
    """

    loss: float
    step_ms: float
    peak_bytes: int
    saved_bytes: int
    micro_batch: int
    evicted_bytes: int = 0
    released_gradients: int = 0
    overrun_bytes: int = 0
    budget_bytes: int | None = None


class Session:
    """Trains a model within a budget of bytes that bounds the whole process.

    Args:
        model: any ``nn.Module`` on the CPU (a GPU model is trained without a budget).
        optimizer: any ``torch.optim.Optimizer`` over its parameters.
        budget: the whole process's, its floor included: bytes as ``"700MB"`` or an int, a
            fraction of the machine as 0.5 or ``"50%"``, ``"auto"`` for what the machine can
            spare, or a function that returns one of these and is called every 20 ms; None
            trains without a limit. ``session.budget`` may be set at any moment, in mid-step
            and from another thread too. Tighter limits of the system (memory cgroups, free
            memory, ulimits) come first and are followed while it trains.
        bits: fixes the policy (1 … 8, ``"exact"``, ``"plain"``); None lets the
            planner choose. Without a budget None means ``"plain"``.
        seed: names the run in the codes' random rotations.
        floor_bytes: the process before the model existed; by default the
            resident size now, less the model.
        allow_batchnorm_split: permit micro-batches although batch statistics
            then change.
        spill: where tensors go whose treatment is *spill* (to disk), and how much of them.
        pool_bytes: the most that codes may hold, as bytes or ``"200MB"``; None: no cap of
            their own. Below what they need, planes of ``rotated`` codes are given up, the
            least important first, down to one bit; reports say how much. The attribute may
            be changed at any moment, in mid-step and from another thread too.
        release_gradients: step each parameter inside backward, as its gradient completes, and
            free the gradient (``grad`` is None afterwards): the same result, bit for bit. True
            raises where something needs the gradients later; ``"auto"`` then leaves it, and
            ``release_refusal`` says why. The first update commits the step: refused memory is
            no longer answered by a retry but by giving up codes and, at last, by an overrun.

    Raises:
        ReleaseRefusedError: ``release_gradients`` is True, and the optimizer or model forbid it.
        UnitError: the budget or the pool's bytes cannot be read.
        PoolFullError: ``pool_bytes`` was given, and the system grants no addresses.
        PlatformError: a budget was given for a model on a GPU.
        ValueError: ``bits`` names no policy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        budget: governor.Budget,
        *,
        bits: int | str | None = None,
        seed: int = 0,
        floor_bytes: int | None = None,
        allow_batchnorm_split: bool = False,
        pool_bytes: str | int | None = None,
        release_gradients: ReleaseMode = False,
        spill: SpillOptions | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.floor_bytes = floor_bytes or measure.resident_bytes() - parameter_bytes(model)
        self.plan: Plan | None = None
        self.predicted_peak_bytes: int | None = None
        self.saved_bytes_plain = 0
        self.saved_bytes_peak = 0
        self.evicted_bytes = 0
        self._names = planner.LADDER if bits is None else (policy_for(bits).name,)
        self._fixed_policy = plain_policy() if bits is None else policy_for(bits)
        self._seed = seed
        self._allow_split = allow_batchnorm_split
        store = make_store(parse_optional_bytes(pool_bytes))
        self._capture = Capture(model, store, spill)
        self._release = GradientRelease(
            release_gradients, model, optimizer, self._capture.parameter_reads
        )
        self._profile: Profile | None = None
        self._first: Plan | None = None
        self._step_index = 0
        self._planned_for_bytes = 0
        self._peak_bytes = 0
        self._keeper = MemoryKeeper(store.give_back)
        self._adapting = Adapting(budget, self._keeper, self._capture.release_scratch)
        self._planned_budget_bytes = self.budget_bytes
        self._profiled_budget_bytes = 0
        self._evidence: Evidence | None = None
        if self.budget_bytes is not None:
            _refuse_gpu(model)
        measure.reset_peak()

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
        self._adapting.close()
        self._keeper.close()

    @property
    def budget(self) -> governor.Budget:
        """What was asked; set it at any moment, from any thread: it acts at once.

        A lower budget in mid-step: recycled memory goes back and the pool gives
        up planes before this returns; the step finishes, or is tried again under
        a tighter plan if it needs more. The next step is planned anew.

        Raises:
            UnitError: it is no budget; the one before stays.
        """
        return self._adapting.asked

    @budget.setter
    def budget(self, value: governor.Budget) -> None:
        if value is not None:
            _refuse_gpu(self.model)
        self._adapting.ask(value)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in force now: what was asked, or less where a limit of the system is tighter.

        Setting it is setting ``budget``.
        """
        return self._adapting.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int | None) -> None:
        self.budget = value

    @property
    def budget_history(self) -> list[BudgetChange]:
        """Every budget that was in force, with the reason and what was given up at once."""
        return list(self._adapting.history)

    @property
    def settings(self) -> list[str]:
        """What was set in the process for the budget's sake, in words; ``close`` undoes it."""
        return self._keeper.settings

    @property
    def peak_bytes(self) -> int:
        """The process's highest memory since the session began (bytes)."""
        return max(self._peak_bytes, measure.peak_bytes())

    @property
    def pool_bytes(self) -> int | None:
        """The most that codes may hold; setting it acts at once."""
        return self._capture.pool_bytes

    @pool_bytes.setter
    def pool_bytes(self, value: str | int | None) -> None:
        self._capture.pool_bytes = parse_optional_bytes(value)

    @property
    def release_refusal(self) -> str:
        """Why the last step released no gradients although that was asked for; else empty."""
        return self._release.refusal

    @property
    def profile(self) -> Profile | None:
        """What was measured before planning; None before ``prepare`` or without a budget."""
        return self._profile

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
        if self.plan is not None:
            return self.plan
        if self.budget_bytes is None:
            self.plan = Plan(
                self._fixed_policy,
                batch_size(batch),
                predicted_peak_bytes=0,
                return_freed_blocks=False,
                reason="no budget was given",
            )
            return self.plan
        self._refuse_without_room_to_measure()
        self._planned_for_bytes = batch_bytes(batch)
        self._planned_budget_bytes = self._profiled_budget_bytes = self.budget_bytes
        self._evidence = None
        self._keeper.open()
        with self._keeper.unbounded():
            self._profile = self._measure_profile(batch, loss_fn, on_progress)
        try:
            plan = planner.make_plan(self._profile, self.budget_bytes, self._names)
        except BudgetError:
            self._keeper.close()
            raise
        self.predicted_peak_bytes = plan.predicted_peak_bytes
        self._adopt(plan)
        if plan.return_freed_blocks:
            self._first = planner.tightest_first(plan, self._profile, self._names)
        return plan

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
        """
        self._follow_budget(self._adapting.begin_step())
        if self.budget_bytes is not None and batch_bytes(batch) > self._planned_for_bytes:
            self.plan = self._first = None
        plan = self.plan or self.prepare(batch, loss_fn)
        running = self._first or plan
        self._begin_peak()
        start_s = time.perf_counter()
        loss, running = self._within_budget(batch, loss_fn, running)
        if running.return_freed_blocks:
            self._capture.release_scratch()
        with self._keeper.unbounded():
            compiler.step(self.optimizer)
        step_ms = 1000 * (time.perf_counter() - start_s)
        peak = self._end_peak()
        self._count_saved(batch)
        self._step_index += 1
        if self._keeper.overrun_bytes:
            self._tighter(running)
        elif self._first is not None:
            self._settle(peak)
        stats = self._capture.stats
        return StepReport(
            loss,
            step_ms,
            peak,
            stats.held_peak_bytes,
            running.micro_batch,
            stats.evicted_bytes,
            self._release.count.released,
            self._keeper.overrun_bytes,
            self.budget_bytes,
        )

    def explain(self) -> list[dict[str, Any]]:
        """One row per site of the last captured step: site, need, treatment, bytes."""
        return [report.as_dict() for report in self._capture.sites()]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as this one would have (JSON-able)."""
        return {
            "plan": None if self.plan is None else _plan_state(self.plan),
            "first": None if self._first is None else _plan_state(self._first),
            "profile": None if self._profile is None else asdict(self._profile),
            "seed": self._seed,
            "step_index": self._step_index,
            "planned_for_bytes": self._planned_for_bytes,
            "planned_budget_bytes": self._planned_budget_bytes,
            "profiled_budget_bytes": self._profiled_budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "peak_bytes": self.peak_bytes,
            "saved_bytes_plain": self.saved_bytes_plain,
            "saved_bytes_peak": self.saved_bytes_peak,
            "evicted_bytes": self.evicted_bytes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``: nothing is measured or planned again."""
        self.plan = _plan_from_state(state["plan"])
        self._first = _plan_from_state(state["first"])
        self._profile = _profile_from_state(state["profile"])
        self._seed = state["seed"]
        self._step_index = state["step_index"]
        self._planned_for_bytes = state["planned_for_bytes"]
        self._planned_budget_bytes = state["planned_budget_bytes"]
        self._profiled_budget_bytes = state["profiled_budget_bytes"]
        self.predicted_peak_bytes = state["predicted_peak_bytes"]
        self._peak_bytes = state["peak_bytes"]
        self.saved_bytes_plain = state["saved_bytes_plain"]
        self.saved_bytes_peak = state["saved_bytes_peak"]
        self.evicted_bytes = state["evicted_bytes"]
        if self.plan is not None and self.plan.return_freed_blocks:
            self._keeper.open()

    def _measure_profile(
        self, batch: Any, loss_fn: LossFunction, on_progress: Callable[[str], None]
    ) -> Profile:
        profiler = Profiler(
            self.model, self.optimizer, self._capture, self._keeper, self.floor_bytes
        )
        policies = tuple(policy_named(name) for name in self._names)
        assert self.budget_bytes is not None
        return profiler.profile(
            batch,
            loss_fn,
            policies,
            self.budget_bytes,
            allow_split=self._allow_split,
            on_progress=on_progress,
        )

    def _refuse_without_room_to_measure(self) -> None:
        """A hopeless budget is still measured, to name the least one, if the machine has room."""
        assert self.budget_bytes is not None
        gradients = gradient_bytes(self.model)
        least = measure.resident_bytes() + gradients
        if least > self.budget_bytes and governor.headroom_bytes() < ROOM_TO_MEASURE * gradients:
            raise BudgetError(
                f"asked for a budget of {format_bytes(self.budget_bytes)}; the process with its "
                f"model and gradients alone takes {format_bytes(least)}, before any batch, and "
                "there is no room here to measure more; try a budget well above that, or a "
                "smaller model",
                least,
            )

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        if not plan.return_freed_blocks:
            self._keeper.close()

    def _follow_budget(self, budget_bytes: int | None) -> None:
        """Plan anew if the budget is another one than the plan was made for.

        Raises:
            BudgetError: no plan can hold it; parameters are untouched.
        """
        if budget_bytes == self._planned_budget_bytes or self.plan is None:
            return
        self._planned_budget_bytes = budget_bytes
        if budget_bytes is None or self._must_profile_again(budget_bytes):
            self._keeper.close()
            self.plan = self._first = None
            return
        self._replan(budget_bytes)

    def _must_profile_again(self, budget_bytes: int) -> bool:
        """Nothing was measured, or policies were left out that would fit now."""
        if self._profile is None:
            return True
        left_out = len(self._profile.measurements) < len(self._names)
        return left_out and budget_bytes > REPROFILE_GROWTH * self._profiled_budget_bytes

    def _replan(self, budget_bytes: int) -> Plan:
        assert self._profile is not None
        can_refuse = unsupported_reason() is None
        plan, self._first = replan(
            self._profile, budget_bytes, self._names, self._evidence, can_refuse=can_refuse
        )
        if plan.return_freed_blocks:
            self._keeper.open()
        self._adopt(plan)
        return plan

    def _within_budget(self, batch: Any, loss_fn: LossFunction, plan: Plan) -> tuple[float, Plan]:
        """The gradient under this plan, or under a tighter one if an allocation was refused."""
        before = _Before(self.model)
        while True:
            refusals = self._keeper.refusals()
            self._adapting.bound(plan)
            try:
                return self._forward_backward(batch, loss_fn, plan, before), plan
            except (RuntimeError, PoolFullError) as error:
                refused = self._keeper.refusals() != refusals
                if not refused and not isinstance(error, PoolFullError):
                    raise
                self.optimizer.zero_grad(set_to_none=True)
                self._capture.release_scratch()
                before.restore()
                tighter = self._tighter(plan)
                if tighter is None and refused:
                    raise self._refusal() from error
                if tighter is None:
                    raise
                plan = tighter

    def _tighter(self, plan: Plan) -> Plan | None:
        """The next tighter plan, adopted; None where none is known.

        Parameters are untouched, so the step can be retried.
        """
        if self._profile is None or self.budget_bytes is None:
            return None
        if self.budget_bytes != self._planned_budget_bytes:  # it moved in mid-step
            self._planned_budget_bytes = self.budget_bytes
            moved = self._replan(self.budget_bytes)
            if moved.predicted_peak_bytes < plan.predicted_peak_bytes:
                return self._first or moved
        tighter = planner.tighter(plan, self._profile, self.budget_bytes, self._names)
        if tighter is not None:
            self._first = None
            self._adopt(tighter)
        return tighter

    def _refusal(self) -> BudgetError:
        assert self._profile is not None
        assert self.budget_bytes is not None
        missing = self.budget_bytes + self._keeper.missing_bytes
        least = max(planner.least_budget(self._profile, self._names), missing)
        return BudgetError(planner.refusal(self._profile, self.budget_bytes, least), least)

    def _forward_backward(
        self, batch: Any, loss_fn: LossFunction, plan: Plan, before: _Before
    ) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        parts = pieces(batch, plan.micro_batch)
        self._release.begin(len(parts))
        total, weight, is_sum = 0.0, 0.0, False
        for index, part in enumerate(parts):
            loss = self._piece_forward(part, loss_fn, plan.policy, index)
            if not torch.isfinite(loss.mean):
                self._refuse_nonfinite(part, loss_fn, loss.mean.item(), before)
            is_sum = loss.is_sum
            self._piece_backward(loss, only=len(parts) == 1, examples=batch_size(batch))
            total += loss.mean.item() * loss.weight
            weight += loss.weight
            del loss
        if is_sum and len(parts) > 1:
            scale_gradients(list(self.model.parameters()), 1.0 / weight)
        return total / weight

    def _piece_forward(
        self, part: Any, loss_fn: LossFunction, policy: Policy, index: int
    ) -> WeightedLoss:
        capture = self._capture.step(
            policy, seed=self._seed, step_index=self._step_index, micro_index=index, batch=part
        )
        with capture, self._release.watching():
            return read_loss(loss_fn(self.model, part), batch_size(part))

    def _piece_backward(self, loss: WeightedLoss, *, only: bool, examples: int) -> None:
        if only:
            scaled = loss.mean
        elif loss.is_sum:
            scaled = loss.total
        else:
            scaled = loss.total * (loss.weight / examples)
        with self._release.stepping(scaled, on_commit=self._keeper.must_finish):
            scaled.backward()  # type: ignore[no-untyped-call]

    def _refuse_nonfinite(
        self, part: Any, loss_fn: LossFunction, value: float, before: _Before
    ) -> NoReturn:
        before.restore()
        where = first_nonfinite(self.model, part, lambda: loss_fn(self.model, part))
        before.restore()
        self.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLossError(
            f"the loss became {value} at step {self._step_index}; it began in {where}; parameters "
            f"are those from before this step; try a lower learning rate, more bits, or check the "
            f"data"
        )

    def _begin_peak(self) -> None:
        self._peak_bytes = self.peak_bytes
        measure.reset_peak()

    def _end_peak(self) -> int:
        peak = measure.peak_bytes()
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def _count_saved(self, batch: Any) -> None:
        stats = self._capture.stats
        part = self.plan.micro_batch if self.plan else 1
        pieces_of_plain = max(1.0, batch_size(batch) / part)
        plain = int(stats.plain_peak_bytes * pieces_of_plain)
        self.saved_bytes_plain = max(self.saved_bytes_plain, plain)
        # The first step ran under a tighter plan, so it says nothing of this plan's peak.
        self.saved_bytes_peak = max(self.saved_bytes_peak, stats.held_peak_bytes)
        self.evicted_bytes += stats.evicted_bytes

    def _settle(self, measured_peak_bytes: int) -> None:
        assert self.plan
        assert self._first
        assert self._profile
        self._evidence = Evidence(self._first, measured_peak_bytes)
        self._first = None
        budget_bytes = self._planned_budget_bytes
        if budget_bytes is None or budget_bytes != self.budget_bytes:
            return  # it moved in mid-step; the next one is planned anew
        evidence, names = self._evidence, self._names
        settled = planner.settle(self.plan, self._profile, *evidence, budget_bytes, names)
        self._adopt(settled)


class _Before:
    """Buffers and random state from before a forward pass, to be put back if it went wrong."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._random_state = torch.get_rng_state()

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        torch.set_rng_state(self._random_state)


def _refuse_gpu(model: nn.Module) -> None:
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        raise PlatformError(
            f"asked for a budget for a model on {device}; budgets bound the process's own memory; "
            "move the model to the CPU, or pass budget=None"
        )


def _plan_state(plan: Plan) -> dict[str, Any]:
    return {
        "policy": plan.policy.name,
        "micro_batch": plan.micro_batch,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "return_freed_blocks": plan.return_freed_blocks,
        "reason": plan.reason,
    }


def _plan_from_state(state: dict[str, Any] | None) -> Plan | None:
    if state is None:
        return None
    rest = {name: value for name, value in state.items() if name != "policy"}
    return Plan(policy_named(state["policy"]), **rest)


def _profile_from_state(state: dict[str, Any] | None) -> Profile | None:
    if state is None:
        return None
    measurements = {
        name: tuple(Measurement(**point) for point in points)
        for name, points in state["measurements"].items()
    }
    return Profile(**(state | {"measurements": measurements}))
