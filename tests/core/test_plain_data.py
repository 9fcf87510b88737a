"""Plans and profiles survive JSON, whatever is in them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import profiles

from daf.core.json_dataclasses import from_plain, to_plain
from daf.core.plan import Plan
from daf.core.policy import Method, Need, Policy, Site, Treatment
from daf.core.profile import Profile
from daf.session.plan_selector import PeakMeasurement

names = st.text(max_size=8)
sites = st.builds(Site, names, names, st.integers(0, 9), st.integers(0, 3))
treatments = st.builds(
    Treatment, st.sampled_from(Method), st.integers(0, 8), st.booleans(), on_host=st.booleans()
)
numbers = st.floats(allow_nan=False, allow_infinity=False)


def mappings(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> Any:
    return st.dictionaries(keys, values, max_size=4).map(MappingProxyType)


policies = st.builds(
    Policy,
    names,
    mappings(st.sampled_from(Need), treatments),
    mappings(sites, treatments),
    st.booleans(),
    st.frozensets(names, max_size=4),
    mappings(sites, numbers),
    st.frozensets(names, max_size=4),
)
plans = st.builds(
    Plan,
    policies,
    st.integers(1, 10**6),
    st.integers(0, 2**60),
    st.booleans(),
    names,
    st.booleans(),
    numbers,
    numbers,
    st.lists(names, max_size=3).map(tuple),
    mappings(names, st.integers(0, 2**60)),
)


def through_json(kind: type[Any], value: Any) -> Any:
    return from_plain(kind, json.loads(json.dumps(to_plain(value))))


@settings(max_examples=25, deadline=None)
@given(plans)
def test_a_plan_comes_back_equal_and_does_the_same_at_every_site(plan: Plan) -> None:
    found = through_json(Plan, plan)
    assert found == plan
    assert type(found.policy.replayed) is frozenset
    assert type(found.policy.by_site) is MappingProxyType
    for need in Need:
        for site in plan.policy.by_site:
            assert found.policy.treatment(need, site) == plan.policy.treatment(need, site)
            assert isinstance(found.policy.treatment(need, site).method, Method)
    assert all(isinstance(need, Need) for need in found.policy.by_need)


@given(profiles(most=6), mappings(sites, numbers))
def test_a_profile_comes_back_equal(measured: Profile, weights: Any) -> None:
    weighted = replace(measured, weights=weights)
    assert through_json(Profile, weighted) == weighted


def test_evidence_comes_back_equal() -> None:
    assert through_json(PeakMeasurement, PeakMeasurement(3, 5)) == PeakMeasurement(3, 5)


@pytest.mark.parametrize(
    "plain",
    [{"predicted_bytes": 3}, {"predicted_bytes": 3, "measured_bytes": "many"}, {"unknown": 1}],
)
def test_what_is_from_something_else_is_refused(plain: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_plain(PeakMeasurement, plain)
