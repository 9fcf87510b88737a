"""(Profile, budget) to Plan: the planner's front door.

Every function is pure: the same profile and budget give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.core.profile import Profile
from daf.core.units import format_bytes
from daf.planning import policies
from daf.planning.bit_widths import is_lossy
from daf.planning.candidate import Candidate, with_margin, without_margin
from daf.planning.highs import LinearProgram
from daf.planning.mip import RELATIVE_GAP
from daf.planning.options import EVERYTHING, Allowed
from daf.planning.policies import strategy_named
from daf.planning.search import Problem, Search, Shape
from daf.planning.table import kept_selection, level_selection, make_table

# Before anything was measured: two bits everywhere, with a little room for the few sites that get
# fewer. As a seventh of the batch's own variance it costs what a batch smaller by an eighth would.
DEFAULT_TOLERANCE = 0.14
# The most noise, relative to the batch's own; several are tried in turn. None: the default, and
# if that cannot be, as much as it takes.
Tolerance = float | tuple[float, ...] | None
# A first answer, in force until the search is over, may be slower than the best by this share.
QUICK_GAP = 0.1
# Times of micro-batches are predicted from those of others: BERT-small's in ones of 8 were
# predicted 3 % shorter than in ones of 32, and took a tenth longer. So much larger ones may be
# faster, if their step is predicted no more than so much longer.
RIVAL_SIZE = 2
RIVAL_MS = 1.25
# By how much of what a refused plan holds above the floor the next one holds less, tried in
# turn; if neither fits, the least of all is next.
TIGHTER_SHARES = (0.25, 0.1)
SMALLEST_STEP_BYTES = 10 * 2**20


def policy_names() -> tuple[str, ...]:
    """The registered policies that choose what is done at every site; levels are not among them."""
    return tuple(name for name, each in policies.POLICIES.items() if not each.is_level)


def warm_up() -> None:
    """Load the solver, so that what it holds for good is measured with everything else."""
    amounts = np.ones(8)
    LinearProgram(amounts, amounts).solve(whole=amounts > 0, most_nodes=1)


def make_plan(
    profile: Profile,
    budget_bytes: int,
    *,
    policy: str = "optimal",
    tolerance: Tolerance = None,
    allowed: Allowed = EVERYTHING,
    quickly: bool = False,
    also: Sequence[Profile] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan of a policy whose predicted peak is within the budget.

    Args:
        profile: what was measured.
        budget_bytes: the whole process's budget, floor included.
        policy: a registered one, of which ``"optimal"`` takes the least time a step.
        tolerance: the most variance that codes may add to the gradient, relative to the
            batch's own (0: only lossless treatments). None: ``DEFAULT_TOLERANCE``, and
            where that cannot hold the budget, as much as it takes. Several are tried in turn.
        allowed: what execution can carry out.
        quickly: a plan within ``QUICK_GAP`` of the best one instead of ``RELATIVE_GAP``.
        also: what was measured of the same step with other operators; the fastest plan is taken.
        stop: asked between two programs whether the best plan so far is good enough.

    Raises:
        BudgetError: none fits; ``least_bytes`` is the least budget that would.
        UnknownNameError: there is no such policy.
    """
    return make_plans(
        (profile, *also),
        budget_bytes,
        policy=policy,
        tolerance=tolerance,
        allowed=allowed,
        quickly=quickly,
        stop=stop,
    )[0]


def make_plans(
    profiles: Sequence[Profile],
    budget_bytes: int,
    *,
    policy: str = "optimal",
    tolerance: Tolerance = None,
    allowed: Allowed = EVERYTHING,
    quickly: bool = False,
    with_others: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Plan, ...]:
    """The best plan with each profile's operators, the fastest predicted first.

    The arguments are ``make_plan``'s. ``with_others``: beside each of these, where there are such,
    the best one that adds no noise, and its rival with much larger micro-batches.

    Raises:
        BudgetError: none fits; ``least_bytes`` is the least budget that would.
        UnknownNameError: there is no such policy.
    """
    gap = QUICK_GAP if quickly else RELATIVE_GAP
    find = strategy_named(policy).find

    def plans_of(profile: Profile, most: float) -> list[Plan]:
        limit = without_margin(profile, budget_bytes)
        problem = Problem(profile, limit, most, allowed, gap, stop)
        best = find(problem)
        if best is None:
            return []
        found = [best.as_plan(profile, budget_bytes, policy)]
        if with_others:
            others = [rival_of(best, problem)]
            if is_lossy(found[0].policy) and not stop():
                others.append(find(replace(problem, tolerance=0.0)))
            found += [each.as_plan(profile, budget_bytes, policy) for each in others if each]
        return found

    for most in _tolerances(tolerance):
        plans = [plan for profile in profiles for plan in plans_of(profile, most)]
        if plans:
            return tuple(sorted(plans, key=lambda plan: plan.predicted_step_ms))
    least = least_feasible_budget(
        profiles[0], policy=policy, tolerance=tolerance, allowed=allowed, also=profiles[1:]
    )
    raise BudgetError(refusal(profiles[0], budget_bytes, least), least)


def rival_of(best: Candidate, problem: Problem) -> Candidate | None:
    """The fastest candidate with much larger micro-batches, if it is nearly as fast as the best."""
    least_micro_batch = RIVAL_SIZE * best.table.micro_batch
    most_ms = RIVAL_MS * best.objective(problem.profile)
    if least_micro_batch > problem.profile.batch_size or problem.stop():
        return None
    found = Search(replace(problem, least_micro_batch=least_micro_batch, most_ms=most_ms)).run()
    return found and replace(found, bound_ms=best.bound_ms)


def least_feasible_budget(
    profile: Profile,
    *,
    policy: str = "optimal",
    tolerance: Tolerance = None,
    allowed: Allowed = EVERYTHING,
    also: Sequence[Profile] = (),
) -> int:
    """The least budget (bytes) under which ``make_plan`` finds a plan.

    Raises:
        BudgetError: no plan is within the tolerance, whatever the budget.
        UnknownNameError: there is no such policy.
    """
    least, peaks = strategy_named(policy).least, []
    for each in (profile, *also):
        found = least(Problem(each, tolerance=_tolerances(tolerance)[-1], allowed=allowed))
        if found is not None:
            peaks.append(found.peak_bytes(each))
    if not peaks:
        raise BudgetError(f"no plan of policy {policy!r} adds as little noise as {tolerance}")
    return min(peaks)


def choose(
    profile: Profile,
    budget_bytes: int,
    *,
    policy: str = "optimal",
    tolerance: Tolerance = None,
    allowed: Allowed = EVERYTHING,
) -> Candidate | None:
    """The candidate behind ``make_plan``'s plan, for its account; None where nothing fits."""
    problem = Problem(profile, without_margin(profile, budget_bytes), allowed=allowed)
    find = strategy_named(policy).find
    found = (find(replace(problem, tolerance=most)) for most in _tolerances(tolerance))
    return next((each for each in found if each is not None), None)


def _tolerances(tolerance: Tolerance) -> tuple[float, ...]:
    if tolerance is None:
        return DEFAULT_TOLERANCE, math.inf
    return tolerance if isinstance(tolerance, tuple) else (tolerance,)


def first_plan(
    profile: Profile,
    plan: Plan,
    budget_bytes: int,
    *,
    tolerance: Tolerance = None,
    allowed: Allowed = EVERYTHING,
) -> Plan | None:
    """For the first full-size step: the plan's pieces, holding as little as one level can.

    None where the plan itself holds no more than that.
    """
    problem = Problem(profile, tolerance=_tolerances(tolerance)[-1], allowed=allowed)
    found = policies.lowest_level(problem, Shape(plan.micro_batch, plan.release_gradients))
    if found.peak_bytes(profile) >= plan.predicted_peak_bytes:
        return None
    return found.as_plan(profile, budget_bytes, "first step")


def kept_peak_bytes(profile: Profile) -> int:
    """The process's peak (bytes) when the whole batch keeps everything, margin included."""
    table = make_table(profile, profile.batch_size, EVERYTHING)
    return with_margin(profile, table.peak_bytes(kept_selection(table)))


def level_peak_bytes(profile: Profile, examples: int, level: str) -> int:
    """The process's peak (bytes) in one micro-batch at one level (``keep``, ``exact`` or
    a width as text), every tensor with a code of its own; margin included.
    """
    table = make_table(profile, examples, replace(EVERYTHING, replay=False))
    followed = [table.option(column) for column in level_selection(table, level)]
    own = [
        table.column_of(family, option.level, follow=False)
        for family, option in enumerate(followed)
    ]
    return with_margin(profile, table.peak_bytes([each for each in own if each is not None]))


def update_peak_bytes(profile: Profile, *, release: bool) -> int:
    """The process's peak (bytes) in the optimizer's own step, margin included."""
    gradients = 0 if release else profile.gradient_bytes
    held = profile.resident_bytes + profile.optimizer_bytes + gradients + profile.update_bytes
    return with_margin(profile, held)


def tighter_plan(
    profile: Profile,
    plan: Plan,
    *,
    policy: str = "optimal",
    tolerance: Tolerance = None,
    allowed: Allowed = EVERYTHING,
    also: Sequence[Profile] = (),
) -> Plan | None:
    """A plan that is predicted to hold clearly less than ``plan``; None if there is none.

    For a step that was refused memory although its plan was predicted to fit.
    """
    find = partial(
        make_plan, profile, policy=policy, tolerance=tolerance, allowed=allowed, also=also
    )
    # The floor may lie above all of it, where memory from before was given back since.
    above = max(SMALLEST_STEP_BYTES, plan.predicted_peak_bytes - profile.floor_bytes)
    least: int | None = None
    for share in TIGHTER_SHARES:
        try:
            return find(plan.predicted_peak_bytes - int(share * above), quickly=True)
        except BudgetError as error:
            least = error.least_bytes
    if least is None or least >= plan.predicted_peak_bytes:
        return None
    return find(least)


def refusal(profile: Profile, budget_bytes: int, least_bytes: int) -> str:
    """Why a budget cannot hold the job, and what to try."""
    held = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    advice = "a smaller batch or a smaller model"
    if profile.split_refusal:
        advice += f" (the batch is not split because {profile.split_refusal})"
    return (
        f"asked for a budget of {format_bytes(budget_bytes)}; this job needs at least "
        f"{format_bytes(least_bytes)}: {format_bytes(profile.floor_bytes)} before the model "
        f"exists, {format_bytes(held)} of parameters, gradients and optimizer state, and the rest "
        f"for a batch of {profile.batch_size}; try budget={least_bytes}, {advice}"
    )
