"""(Profile, budget) to Plan: the planner's front door.

Every function is pure: the same profile and budget give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from daf.core.errors import BudgetError, UnknownNameError
from daf.core.plan import Plan
from daf.core.profile import Profile
from daf.core.units import format_bytes
from daf.planning import policies
from daf.planning.bit_widths import is_lossy
from daf.planning.candidate import Candidate, with_margin, without_margin
from daf.planning.highs import LinearProgram
from daf.planning.options import Allowed
from daf.planning.table import kept_selection, level_selection, make_table

POLICIES = policies.POLICIES
LEVELS = policies.LEVELS
# Before anything was measured: two bits everywhere, with a little room for the few sites that get
# fewer. As a seventh of the batch's own variance it costs what a batch smaller by an eighth would.
DEFAULT_TOLERANCE = 0.14
EVERYTHING = Allowed()
# The most noise, relative to the batch's own; several are tried in turn. None: the default, and
# if that cannot be, as much as it takes.
Tolerance = float | tuple[float, ...] | None
# By how much of what a refused plan holds above the floor the next one holds less, tried in
# turn; if neither fits, the least of all is next.
TIGHTER_SHARES = (0.25, 0.1)
SMALLEST_STEP_BYTES = 10 * 2**20


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
        policy: one of ``POLICIES``, of which ``"optimal"`` takes the least time a step; or one
            of ``LEVELS``, the same at every site.
        tolerance: the most variance that codes may add to the gradient, relative to the
            batch's own (0: only lossless treatments). None: ``DEFAULT_TOLERANCE``, and
            where that cannot hold the budget, as much as it takes. Several are tried in turn.
        allowed: what execution can carry out.
        quickly: a greedy plan in milliseconds instead of the best one; ``bound_ms``
            says how far from the best it is at most.
        also: what was measured of the same step with other operators; the fastest plan is taken.
        stop: asked now and then whether the best plan so far is good enough.

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
    the best one that adds no noise, and one of much larger pieces that is nearly as fast.

    Raises:
        BudgetError: none fits; ``least_bytes`` is the least budget that would.
        UnknownNameError: there is no such policy.
    """
    name = _checked(policy)

    def best(profile: Profile, most: float) -> list[Plan]:
        limit = without_margin(profile, budget_bytes)
        found = _find(name, profile, limit, most, allowed, quickly=quickly, stop=stop)
        ways = [found, found.rival] if found is not None and with_others else [found]
        return [each.as_plan(profile, budget_bytes, name) for each in ways if each is not None]

    for most in _tolerances(tolerance):
        plans = []
        for profile in profiles:
            found = best(profile, most)
            if with_others and found and is_lossy(found[0].policy) and not stop():
                found += best(profile, 0.0)[:1]
            plans += found
        if plans:
            return tuple(sorted(plans, key=lambda plan: plan.predicted_step_ms))
    least = least_feasible_budget(
        profiles[0], policy=policy, tolerance=tolerance, allowed=allowed, also=profiles[1:]
    )
    raise BudgetError(refusal(profiles[0], budget_bytes, least), least)


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
    name = _checked(policy)
    peaks = []
    for each in (profile, *also):
        found = policies.least(name, each, _tolerances(tolerance)[-1], allowed)
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
    limit = without_margin(profile, budget_bytes)
    for most in _tolerances(tolerance):
        found = _find(_checked(policy), profile, limit, most, allowed, quickly=False)
        if found is not None:
            return found
    return None


def _find(
    name: str,
    profile: Profile,
    limit: int,
    tolerance: float,
    allowed: Allowed,
    *,
    quickly: bool,
    stop: Callable[[], bool] = lambda: False,
) -> Candidate | None:
    searched = "quick" if quickly and name == "optimal" else name
    found = policies.find(searched, profile, limit, tolerance, allowed, stop)
    by_programs = name in ("optimal", "sage") or (name == "quantize" and bool(profile.weights))
    if found is None and by_programs:
        # At the very least budget a search may miss what the least peak's own program finds.
        tightest = policies.least(name, profile, tolerance, allowed)
        if tightest is not None and tightest.table.peak_bytes(list(tightest.selection)) <= limit:
            return tightest
    return found


def _tolerances(tolerance: Tolerance) -> tuple[float, ...]:
    if tolerance is None:
        return DEFAULT_TOLERANCE, math.inf
    return tolerance if isinstance(tolerance, tuple) else (tolerance,)


def _checked(policy: str) -> str:
    if policy not in POLICIES and policy not in LEVELS:
        known = ", ".join((*POLICIES, *LEVELS))
        raise UnknownNameError(f"asked for the policy {policy!r}; known: {known}")
    return policy


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
    most = _tolerances(tolerance)[-1]
    found = policies.lowest_level(
        profile, plan.micro_batch, most, allowed, release=plan.release_gradients
    )
    if found.peak_bytes(profile) >= plan.predicted_peak_bytes:
        return None
    return found.as_plan(profile, budget_bytes, "first step")


def kept_peak_bytes(profile: Profile) -> int:
    """The process's peak (bytes) when the whole batch keeps everything, margin included."""
    table = make_table(profile, profile.batch_size, EVERYTHING)
    return with_margin(profile, table.peak_bytes(kept_selection(table)))


def level_peak_bytes(profile: Profile, examples: int, level: str) -> int:
    """The process's peak (bytes) in one piece at one of ``LEVELS``' words for options (``keep``,
    ``exact`` or a width), every tensor with a code of its own; margin included.
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
