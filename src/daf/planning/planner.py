"""The planner's public functions: (Profile, budget) to Plan, deterministic and pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from daf.planning.options import EVERYTHING, KEPT, Allowed
from daf.planning.policies import Strategy, strategy_named
from daf.planning.search import Problem, Search, Shape, micro_batch_sizes
from daf.planning.table import level_selection, make_table

# Until noise is measured: two bits everywhere, with room for the few sites that get fewer. A
# seventh of the batch's own variance costs as much as a batch smaller by an eighth.
DEFAULT_TOLERANCE = 0.14
QUICK_GAP = 0.1  # how much slower than the best a first plan may be, until the search ends
# Times of micro-batches are predicted from other sizes': BERT-small's of 8 were predicted 3 %
# shorter than of 32, and took 10 % longer. Hence rivals this much larger, up to this much slower.
RIVAL_SIZE = 2
RIVAL_MS = 1.25
# By these shares of its bytes above the floor, a refused plan's next holds less; the least is last.
TIGHTER_SHARES = (0.25, 0.1)
SHORT_MS = 10.0  # of a whole step: its times are Python's and noise
SMALLEST_STEP_BYTES = 10 * 2**20


def policy_names() -> tuple[str, ...]:
    """Return the registered policies that choose per site; levels are not among them."""
    return tuple(name for name, each in policies.POLICIES.items() if not each.is_level)


def warm_up() -> None:
    """Load the solver, so that the memory that it keeps is measured with everything else."""
    amounts = np.ones(8)
    LinearProgram(amounts, amounts).solve(whole=amounts > 0, most_nodes=1)


@dataclass(frozen=True, slots=True)
class Constraints:
    """What plans are made under.

    ``tolerance``: the most variance that codes may add to the gradient, relative to the batch's own
    (0: lossless treatments only; a tuple is tried in turn). None: ``DEFAULT_TOLERANCE``, then no
    bound if that cannot hold the budget.
    """

    policy: str = "optimal"  # a registered name; this one takes the least time a step
    tolerance: float | tuple[float, ...] | None = None
    allowed: Allowed = EVERYTHING  # what execution can carry out

    @property
    def strategy(self) -> Strategy:
        """The policy's strategy; raises UnknownNameError if it is not registered."""
        return strategy_named(self.policy)

    @property
    def tolerances(self) -> tuple[float, ...]:
        """The tolerances to try in turn."""
        if self.tolerance is None:
            return DEFAULT_TOLERANCE, math.inf
        return self.tolerance if isinstance(self.tolerance, tuple) else (self.tolerance,)


OPTIMAL = Constraints()


def make_plans(
    profiles: Sequence[Profile],
    budget_bytes: int,
    constraints: Constraints = OPTIMAL,
    *,
    quickly: bool = False,
    with_others: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Plan, ...]:
    """Return the best plan of each profile, the fastest predicted first.

    Args:
        profiles: the measured step; others are of the same step with other operators.
        budget_bytes: for the whole process, floor included.
        constraints: the policy, the tolerance and what execution can carry out.
        quickly: accept plans within ``QUICK_GAP`` of the best, not ``RELATIVE_GAP``.
        with_others: add each one's rival with much larger micro-batches and the best plan without
            noise, where they exist.
        stop: asked between two programs; True returns the best plans so far.

    Raises:
        BudgetError: no plan fits; ``least_bytes`` is the least budget that one does.
    """
    gap = QUICK_GAP if quickly else RELATIVE_GAP
    find = constraints.strategy.find

    def plans_of(profile: Profile, most: float) -> list[Plan]:
        limit = without_margin(profile, budget_bytes)
        # A whole batch that fits is not cut for what times of short steps say.
        is_short = profile.step_ms(profile.batch_size) < SHORT_MS
        is_kept = is_short and kept_peak_bytes(profile) <= budget_bytes
        least = profile.batch_size if is_kept else 1
        problem = Problem(profile, limit, most, constraints.allowed, gap, stop, least)
        if (best := find(problem)) is None:
            return []
        found = [best.as_plan(budget_bytes, constraints.policy)]
        if with_others:
            others = [rival_of(best, problem)]
            if is_lossy(found[0].policy) and not stop():
                others.append(find(replace(problem, tolerance=0.0)))
            found += [each.as_plan(budget_bytes, constraints.policy) for each in others if each]
        return found

    for most in constraints.tolerances:
        plans = [plan for profile in profiles for plan in plans_of(profile, most)]
        if plans:
            return tuple(sorted(plans, key=lambda plan: plan.predicted_step_ms))
    least = least_feasible_budget(profiles, constraints)
    raise BudgetError(refusal(profiles[0], budget_bytes, least), least)


def rival_of(best: Candidate, problem: Problem) -> Candidate | None:
    """Return the fastest candidate with much larger micro-batches; None unless nearly as fast."""
    least_micro_batch = RIVAL_SIZE * best.table.micro_batch
    if least_micro_batch > problem.profile.batch_size or problem.stop():
        return None
    most_ms = RIVAL_MS * best.objective
    found = Search(replace(problem, least_micro_batch=least_micro_batch, most_ms=most_ms)).run()
    return found and replace(found, bound_ms=best.bound_ms)


def least_feasible_budget(profiles: Sequence[Profile], constraints: Constraints = OPTIMAL) -> int:
    """Return the least budget (bytes) of a plan; raises BudgetError if no budget has one."""
    tolerance, allowed = constraints.tolerances[-1], constraints.allowed
    problems = (Problem(each, tolerance=tolerance, allowed=allowed) for each in profiles)
    found = [each for each in map(constraints.strategy.least, problems) if each is not None]
    if not found:
        raise BudgetError(
            f"no plan of policy {constraints.policy!r} adds as little noise as "
            f"{constraints.tolerance}"
        )
    return min(each.predicted_peak_bytes for each in found)


def first_plan(
    profile: Profile, plan: Plan, budget_bytes: int, constraints: Constraints = OPTIMAL
) -> Plan | None:
    """Return a first full-size step's plan: ``plan`` at its lowest level, or None if no lower."""
    tolerance, allowed = constraints.tolerances[-1], constraints.allowed
    problem = Problem(profile, tolerance=tolerance, allowed=allowed)
    found = policies.lowest_level(problem, Shape(plan.micro_batch, plan.release_gradients))
    if found.predicted_peak_bytes >= plan.predicted_peak_bytes:
        return None
    return found.as_plan(budget_bytes, "first step")


def kept_peak_bytes(profile: Profile) -> int:
    """Return the process's peak (bytes) with the whole batch kept, margin included."""
    return level_peak_bytes(profile, profile.batch_size, KEPT)


def kept_parts_fit(profile: Profile, budget_bytes: int) -> bool:
    """Return whether micro-batches that take no longer than the whole batch fit as they are."""
    most_ms = (1 + RELATIVE_GAP) * profile.step_ms(profile.batch_size)
    sizes = [size for size in micro_batch_sizes(profile) if profile.step_ms(size) <= most_ms]
    ends = {sizes[0], sizes[-1]}  # only parts hold gradients meanwhile; the smallest hold least
    return any(level_peak_bytes(profile, size, KEPT) <= budget_bytes for size in ends)


def level_peak_bytes(profile: Profile, examples: int, level: str) -> int:
    """Return the peak (bytes) of one micro-batch at a level, margin included, nothing rederived."""
    table = make_table(profile, examples, replace(EVERYTHING, replay=False))
    followed = enumerate(map(table.option, level_selection(table, level)))
    own = (table.column_of(family, option.level, follow=False) for family, option in followed)
    return with_margin(profile, table.peak_bytes([each for each in own if each is not None]))


def update_peak_bytes(profile: Profile, *, release: bool) -> int:
    """Return the process's peak (bytes) in the optimizer's step, margin included."""
    gradients = 0 if release else profile.gradient_bytes
    held = profile.resident_bytes + profile.optimizer_bytes + gradients + profile.update_bytes
    return with_margin(profile, held)


def tighter_plan(
    profiles: Sequence[Profile], plan: Plan, constraints: Constraints = OPTIMAL
) -> Plan | None:
    """Return a plan predicted to hold clearly less than ``plan``, after a refusal; None if none."""
    find = partial(make_plans, profiles, constraints=constraints)
    # The floor may exceed the prediction, if memory from before has been returned since.
    above = max(SMALLEST_STEP_BYTES, plan.predicted_peak_bytes - profiles[0].floor_bytes)
    least: int | None = None
    for share in TIGHTER_SHARES:
        try:
            return find(plan.predicted_peak_bytes - int(share * above), quickly=True)[0]
        except BudgetError as error:
            least = error.least_bytes
    if least is None or least >= plan.predicted_peak_bytes:
        return None
    return find(least)[0]


def refusal(profile: Profile, budget_bytes: int, least_bytes: int) -> str:
    """Return the message of a budget that cannot hold the job: what it needs, what to try."""
    # Less than the floor where what an earlier job left was given back since.
    before_bytes = min(profile.floor_bytes, profile.resident_bytes - profile.parameter_bytes)
    beside_bytes = max(0, least_bytes - before_bytes)
    # Gradients that are released are not held together.
    held = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    held = min(held, beside_bytes)
    advice = "a smaller batch or a smaller model"
    if profile.split_refusal:
        advice += f" (the batch is not split because {profile.split_refusal})"
    return (
        f"asked for a budget of {format_bytes(budget_bytes)}; this job needs at least "
        f"{format_bytes(least_bytes)}: {format_bytes(before_bytes)} before the model "
        f"exists, {format_bytes(held)} of parameters, gradients and optimizer state, and "
        f"{format_bytes(beside_bytes - held)} for a batch of {profile.batch_size}; try "
        f"budget={least_bytes}, {advice}"
    )
