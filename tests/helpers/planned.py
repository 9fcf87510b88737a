"""Single plans and least budgets by keywords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from daf.core.plan import Plan
from daf.core.profile import Profile
from daf.planning.candidate import Candidate, without_margin
from daf.planning.planner import Constraints, least_feasible_budget, make_plans
from daf.planning.search import Problem


def make_plan(
    profile: Profile,
    budget_bytes: int,
    *,
    also: Sequence[Profile] = (),
    quickly: bool = False,
    **constraints: Any,
) -> Plan:
    """Return the best plan of all profiles."""
    terms = Constraints(**constraints)
    return make_plans((profile, *also), budget_bytes, terms, quickly=quickly)[0]


def least_budget(profile: Profile, *, also: Sequence[Profile] = (), **constraints: Any) -> int:
    """Return the least budget (bytes) of any profile's plans."""
    return least_feasible_budget((profile, *also), Constraints(**constraints))


def choose(profile: Profile, budget_bytes: int, **constraints: Any) -> Candidate | None:
    """Return the candidate behind ``make_plan``'s plan; None if nothing fits."""
    terms = Constraints(**constraints)
    limit_bytes = without_margin(profile, budget_bytes)
    problem = Problem(profile, limit_bytes, allowed=terms.allowed)
    found = (terms.strategy.find(replace(problem, tolerance=most)) for most in terms.tolerances)
    return next((each for each in found if each is not None), None)
