"""Which kind of plan is fastest: tried on the training itself, not only predicted.

Times of steps are predicted from a few examples, whose tensors fit in caches that a whole
batch's do not: MobileNet-v2 was predicted 230 ms and took 550. Plans of one kind are missed
alike, those of another otherwise. So the best plan of every kind runs some steps of the
training, and what is measured of a kind corrects what is predicted of it from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from daf.core.plan import Plan
from daf.planning.bit_widths import is_lossy
from daf.session.resumable import Resumable

# The first step of a plan finds the allocator's blocks as the plan before left them: not counted.
LEAST_STEPS = 3
# Short steps are timed badly, so that there are more of them: as many as take this long together.
TOGETHER_MS = 150.0
SHORTEST_MS = 10.0  # below it a step is mostly what Python does, whatever the plan
# Beyond this multiple of the shortest time predicted a plan is not tried, unless what was measured
# by then is longer still. Of MobileNet-v2's kinds one took 2.4 times as long as predicted and
# another 1.4 times: 1.7 apart. Where steps take 40 ms, mostly Python's own, it was more.
WORTH_TRYING = 1.75
ALIKE = 0.02  # of times: then the plan that adds less noise is the better one
# Steps of smaller batches tell little; where so many times a trial's steps were of such, it ends.
MOST_PASSED = 5
# A batch of at least this share of the bytes planned for counts, its time scaled up.
LEAST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class PlanKind:
    """Plans of one kind run alike operators, so that their predicted times err alike."""

    fused: bool
    lossy: bool
    micro_batch: int


def plan_kind(plan: Plan) -> PlanKind:
    """The kind of a plan."""
    return PlanKind(plan.policy.fused, is_lossy(plan.policy), plan.micro_batch)


class StepMeasurement(NamedTuple):
    """One step: its time, scaled to a whole batch's, and the most that was held for backward."""

    step_ms: float
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Plans that run in turn, ``steps_of_each``, the fastest predicted first, and what the steps so
    far took. It ends at a plan that cannot be expected to be faster.

    ``passed``: how many more steps were of batches too small to count.
    """

    plans: tuple[Plan, ...]
    steps_of_each: int = LEAST_STEPS
    times_ms: tuple[float, ...] = ()
    held_bytes: tuple[int, ...] = ()
    passed: int = 0

    @property
    def is_over(self) -> bool:
        """True if every plan worth it has run, or it takes too long."""
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

    def noted(self, ran: StepMeasurement) -> Trial:
        """The same, one step later."""
        held_bytes = (*self.held_bytes, ran.held_bytes)
        return replace(self, times_ms=(*self.times_ms, ran.step_ms), held_bytes=held_bytes)

    def without_current(self) -> Trial:
        """The same without the plan of the next step, which was refused memory."""
        at = len(self.times_ms) // self.steps_of_each
        ran = at * self.steps_of_each
        return replace(
            self,
            plans=self.plans[:at] + self.plans[at + 1 :],
            times_ms=self.times_ms[:ran],
            held_bytes=self.held_bytes[:ran],
        )

    @property
    def measured_ms(self) -> tuple[float, ...]:
        """The least that a step of each plan took: what disturbs a machine only adds.

        Of the plans that ran all their steps, which are the first ones.
        """
        starts = range(0, len(self.times_ms) - self.steps_of_each + 1, self.steps_of_each)
        return tuple(min(self.times_ms[at + 1 : at + self.steps_of_each]) for at in starts)

    def fastest(self) -> tuple[Plan, int]:
        """The plan to go on with, whose time is now the measured one, and what it held (bytes).

        The first where none has run all its steps.
        """
        if not self.measured_ms:
            return self.plans[0], max(self.held_bytes, default=0)
        best_ms = min(self.measured_ms)
        alike = [at for at, ms in enumerate(self.measured_ms) if ms <= (1 + ALIKE) * best_ms]
        at = min(alike, key=lambda at: (self.plans[at].added_noise, self.measured_ms[at]))
        held = self.held_bytes[at * self.steps_of_each : (at + 1) * self.steps_of_each]
        return self._timed(at), max(held)

    def _timed(self, at: int) -> Plan:
        plan, ms = self.plans[at], self.measured_ms[at]
        reason = f"{plan.reason}; the fastest of {len(self.measured_ms)} tried, {ms:.0f} ms"
        return replace(plan, predicted_step_ms=ms, bound_ms=min(plan.bound_ms, ms), reason=reason)

    def factors(self, before: Mapping[PlanKind, float]) -> dict[PlanKind, float]:
        """Measured over predicted time of each kind, with ``before``, the factors known so far."""
        return {
            plan_kind(plan): factor_of(plan_kind(plan), before) * ms / plan.predicted_step_ms
            for plan, ms in zip(self.plans, self.measured_ms, strict=False)
        }


def trial_of(plans: Sequence[Plan]) -> Trial | None:
    """A trial of the plans, in the order given; None where there is nothing to try.

    Args:
        plans: one of every kind, the fastest predicted first.
    """
    if len(plans) < 2 or plans[0].predicted_step_ms < SHORTEST_MS:
        return None
    steps = max(LEAST_STEPS, math.ceil(TOGETHER_MS / plans[0].predicted_step_ms))
    return Trial(tuple(plans), steps)


def factor_of(kind: PlanKind, factors: Mapping[PlanKind, float]) -> float:
    """A kind's own factor; else the mean of those that are most like it; 1 before any.

    First of those that differ in their micro-batch alone, then of those with its operators.
    """
    if kind in factors:
        return factors[kind]
    other_sizes = [each for each in factors if (each.fused, each.lossy) == (kind.fused, kind.lossy)]
    operators = [each for each in factors if each.fused == kind.fused]
    known = [factors[each] for each in other_sizes or operators or factors]
    return sum(known) / len(known) if known else 1.0


class PlanAutotuner(Resumable):
    """A session's: at most one at a time, and none once one has ended.

    ``trial`` is the one that goes on; ``finalists`` would begin the next; ``factors`` is what
    was learnt of times; ``may_try`` is false once memory was refused to a plan that all trusted.
    """

    KEPT: ClassVar[Mapping[str, Any]] = {
        "trial": Trial,
        "finalists": tuple[Plan, ...],
        "factors": Mapping[PlanKind, float],
        "may_try": bool,
    }

    def __init__(self) -> None:
        self.trial: Trial | None = None
        self.finalists: tuple[Plan, ...] = ()
        self.factors: Mapping[PlanKind, float] = {}
        self.may_try = True
        self._held_bytes: int | None = None

    @property
    def is_settled(self) -> bool:
        """True if nothing is tried, nor to be tried."""
        return not (self.trial or self.finalists)

    @property
    def is_trying_another(self) -> bool:
        """True if the next step runs another plan than the one that is known to fit."""
        return self.trial is not None and not self.trial.is_proving_the_first

    def offer(self, plans: tuple[Plan, ...]) -> None:
        """The best plan of every kind, the fastest predicted first."""
        if self.may_try and not self.factors:
            self.finalists = plans

    def cancel(self) -> None:
        """These plans are no longer the right ones."""
        self.trial, self.finalists = None, ()

    def forget(self) -> None:
        """Nor is anything that was learnt."""
        self.cancel()
        self.factors, self.may_try = {}, True

    def next_plan(self) -> Plan | None:
        """The plan to try in the next step, if any."""
        if self.finalists:
            self.trial, self.finalists = trial_of(self.finalists), ()
        return None if self.trial is None else self.trial.plan

    def note(self, plan: Plan, ran: StepMeasurement, share: float) -> Plan | None:
        """A step ran to its end under this plan; after the last one, the plan that stays.

        Args:
            plan: what the step ran under; only a plan that is being tried counts.
            ran: the step.
            share: of the bytes planned for that its batch had.

        Returns:
            The fastest plan, or None.
        """
        if self.trial is None or plan is not self.trial.plan:
            return None
        if share < LEAST_SHARE:
            self.trial = replace(self.trial, passed=self.trial.passed + 1)
        else:
            self.trial = self.trial.noted(ran._replace(step_ms=ran.step_ms / share))
        return self._ended() if self.trial.is_over else None

    def drop(self, plan: Plan) -> Plan | None:
        """Memory was refused to this plan: one that has proven to fit, where there is one."""
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
        """The most that the plan that stayed held for backward: once after a trial, else None."""
        taken, self._held_bytes = self._held_bytes, None
        return taken

    def corrected(self, plan: Plan) -> Plan:
        """The plan with the times that are predicted now."""
        slower = factor_of(plan_kind(plan), self.factors)
        return replace(
            plan,
            predicted_step_ms=plan.predicted_step_ms * slower,
            bound_ms=plan.bound_ms * slower,
        )
