"""Finds the fastest kind of plan by running the best plan of each kind on the training itself.

Step times are predicted from a few examples, whose tensors fit in caches that a whole batch's do
not: MobileNet-v2 was predicted 230 ms and took 550. Predictions err alike within a kind, so one
measurement corrects all later predictions of its kind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from daf.core.json_dataclasses import Resumable
from daf.core.plan import Plan
from daf.planning.bit_widths import is_lossy

# A plan's first step finds the allocator's blocks as the plan before left them: not counted.
LEAST_STEPS = 3
# Short steps are timed badly; a trial runs as many as together take this long.
TOGETHER_MS = 150.0
SHORTEST_MS = 10.0  # a shorter step is mostly Python's time, whatever the plan
# A plan is tried if predicted within this multiple of the shortest predicted time, or below the
# shortest measured: two of MobileNet-v2's kinds took 2.4 and 1.4 times theirs, which is 1.7 apart.
WORTH_TRYING = 1.75
ALIKE = 0.02  # of times: within this share, the plan that adds less noise is the better one
MOST_PASSED = 5  # times its own steps on batches too small to count, and a trial ends
LEAST_SHARE = 0.9  # of the planned bytes: such a batch counts, its time scaled up


@dataclass(frozen=True, slots=True)
class PlanKind:
    """A class of plans that run alike operators, so that their predicted times err alike."""

    fused: bool
    lossy: bool
    micro_batch: int


def plan_kind(plan: Plan) -> PlanKind:
    """Return the kind of a plan."""
    return PlanKind(plan.policy.fused, is_lossy(plan.policy), plan.micro_batch)


class StepMeasurement(NamedTuple):
    """One step's time, scaled to a whole batch's, and the most bytes held for backward."""

    step_ms: float
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Plans that run in turn, ``steps_of_each`` steps each, the fastest predicted first.

    It ends at a plan not expected to be faster. ``passed``: steps on batches too small to count.
    """

    plans: tuple[Plan, ...]
    steps_of_each: int = LEAST_STEPS
    times_ms: tuple[float, ...] = ()
    held_bytes: tuple[int, ...] = ()
    passed: int = 0

    @property
    def is_over(self) -> bool:
        """True if every plan worth trying has run, or the trial takes too long."""
        at, begun = divmod(len(self.times_ms), self.steps_of_each)
        too_long = self.passed > MOST_PASSED * self.steps_of_each * len(self.plans)
        return too_long or at == len(self.plans) or not (begun or self._is_worth_trying(at))

    def _is_worth_trying(self, at: int) -> bool:
        predicted_ms = self.plans[at].predicted_step_ms
        is_near = predicted_ms <= WORTH_TRYING * self.plans[0].predicted_step_ms
        return is_near or predicted_ms < min(self.measured_ms)

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        return self.plans[len(self.times_ms) // self.steps_of_each]

    @property
    def is_proving_the_first(self) -> bool:
        """True if no plan has run all its steps yet."""
        return len(self.times_ms) < self.steps_of_each

    def noted(self, ran: StepMeasurement) -> "Trial":
        """Return the trial one step later."""
        held_bytes = (*self.held_bytes, ran.held_bytes)
        return replace(self, times_ms=(*self.times_ms, ran.step_ms), held_bytes=held_bytes)

    def without_current(self) -> "Trial":
        """Return the trial without its current plan, which was refused memory."""
        at = len(self.times_ms) // self.steps_of_each
        ran = at * self.steps_of_each
        plans = self.plans[:at] + self.plans[at + 1 :]
        times_ms, held_bytes = self.times_ms[:ran], self.held_bytes[:ran]
        return replace(self, plans=plans, times_ms=times_ms, held_bytes=held_bytes)

    @property
    def measured_ms(self) -> tuple[float, ...]:
        """Least step time of each plan that ran all its steps: disturbances only add time."""
        starts = range(0, len(self.times_ms) - self.steps_of_each + 1, self.steps_of_each)
        return tuple(min(self.times_ms[at + 1 : at + self.steps_of_each]) for at in starts)

    def fastest(self) -> tuple[Plan, int]:
        """Return the fastest plan, timed, and its bytes; the first if none ran all its steps."""
        if not self.measured_ms:
            return self.plans[0], max(self.held_bytes, default=0)
        best_ms = min(self.measured_ms)
        alike = [at for at, ms in enumerate(self.measured_ms) if ms <= (1 + ALIKE) * best_ms]
        at = min(alike, key=lambda at: (self.plans[at].added_noise, self.measured_ms[at]))
        held = self.held_bytes[at * self.steps_of_each : (at + 1) * self.steps_of_each]
        plan, ms = self.plans[at], self.measured_ms[at]
        reason = f"{plan.reason}; the fastest of {len(self.measured_ms)} tried, {ms:.0f} ms"
        bound_ms = min(plan.bound_ms, ms)
        timed = replace(plan, predicted_step_ms=ms, bound_ms=bound_ms, reason=reason)
        return timed, max(held)

    def factors(self, before: Mapping[PlanKind, float]) -> dict[PlanKind, float]:
        """Return measured over predicted time of each kind; ``before`` is what was known so far."""
        return {
            plan_kind(plan): factor_of(plan_kind(plan), before) * ms / plan.predicted_step_ms
            for plan, ms in zip(self.plans, self.measured_ms, strict=False)
        }


def trial_of(plans: Sequence[Plan]) -> Trial | None:
    """Return a trial of one plan of each kind, fastest predicted first; None if not worth it."""
    if len(plans) < 2 or plans[0].predicted_step_ms < SHORTEST_MS:
        return None
    steps = max(LEAST_STEPS, math.ceil(TOGETHER_MS / plans[0].predicted_step_ms))
    return Trial(tuple(plans), steps)


def factor_of(kind: PlanKind, factors: Mapping[PlanKind, float]) -> float:
    """Return a kind's own factor, else the mean of the kinds most like it; 1 before any.

    Kinds that differ in micro-batch alone come first, then those with the same operators.
    """
    if kind in factors:
        return factors[kind]
    other_sizes = [each for each in factors if (each.fused, each.lossy) == (kind.fused, kind.lossy)]
    operators = [each for each in factors if each.fused == kind.fused]
    known = [factors[each] for each in other_sizes or operators or factors]
    return sum(known) / len(known) if known else 1.0


class PlanAutotuner(Resumable):
    """A session's trials: at most one at a time, and none after one has ended.

    ``trial`` is the running one; ``finalists`` begin the next; ``factors`` correct predicted times.
    ``may_try`` is False once memory was refused to a plan that was trusted to fit.
    """

    KEPT = ("trial", "finalists", "factors", "may_try")

    trial: Trial | None = None
    finalists: tuple[Plan, ...] = ()
    factors: Mapping[PlanKind, float] = MappingProxyType({})
    may_try: bool = True
    _held_bytes: int | None = None

    @property
    def is_settled(self) -> bool:
        """True if no trial runs or waits."""
        return not (self.trial or self.finalists)

    @property
    def is_trying_another(self) -> bool:
        """True if the next step runs a plan other than the one known to fit."""
        return self.trial is not None and not self.trial.is_proving_the_first

    def offer(self, plans: tuple[Plan, ...]) -> None:
        """Offer the best plan of every kind, the fastest predicted first, for the next trial."""
        if self.may_try and not self.factors:
            self.finalists = plans

    def cancel(self) -> None:
        """Drop the plans being tried."""
        self.trial, self.finalists = None, ()

    def forget(self) -> None:
        """Drop the plans and everything learnt."""
        self.cancel()
        self.factors, self.may_try = {}, True

    def next_plan(self) -> Plan | None:
        """Return the plan to try in the next step, if any."""
        if self.finalists:
            self.trial, self.finalists = trial_of(self.finalists), ()
        return None if self.trial is None else self.trial.plan

    def note(self, plan: Plan, ran: StepMeasurement, share: float) -> Plan | None:
        """Take in a step that ran to its end; return the fastest plan once the trial ends.

        ``share``: the batch's bytes over the bytes planned for. Only plans being tried count.
        """
        if self.trial is None or plan is not self.trial.plan:
            return None
        if share < LEAST_SHARE:
            self.trial = replace(self.trial, passed=self.trial.passed + 1)
        else:
            self.trial = self.trial.noted(ran._replace(step_ms=ran.step_ms / share))
        return self._ended() if self.trial.is_over else None

    def drop(self, plan: Plan) -> Plan | None:
        """Drop a plan that was refused memory; return a tried plan that is known to fit, if any."""
        trial = self.trial
        if trial is None or plan is not trial.plan or trial.is_proving_the_first:
            self.cancel()
            return None
        self.trial = trial.without_current()
        return self._ended() if self.trial.is_over else self.trial.plans[0]

    def _ended(self) -> Plan:
        assert self.trial is not None
        found, self._held_bytes = self.trial.fastest()
        self.factors = self.trial.factors(self.factors)
        self.trial = None
        return found

    def take_held_bytes(self) -> int | None:
        """Return the chosen plan's peak bytes for backward: once after a trial, else None."""
        taken, self._held_bytes = self._held_bytes, None
        return taken

    def corrected(self, plan: Plan) -> Plan:
        """Return the plan with its time corrected by what was learnt."""
        slower = factor_of(plan_kind(plan), self.factors)
        step_ms, bound_ms = plan.predicted_step_ms * slower, plan.bound_ms * slower
        return replace(plan, predicted_step_ms=step_ms, bound_ms=bound_ms)
