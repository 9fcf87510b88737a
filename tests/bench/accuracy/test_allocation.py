"""Widths: against brute force and an integer program, and the published greedies by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from daf_bench.accuracy.bit_allocation import (
    RELATIVE_GAP,
    STANDARD_TREATMENTS,
    Choice,
    CodedSite,
    actnn_sensitivity,
    actnn_widths,
    coded_sites,
    gact_widths,
    held_bytes,
    least_bytes,
    least_variance,
    uniform,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from daf.core.code_tables import rotated_error
from daf.core.errors import BudgetError, DataError
from daf.core.policy import KEEP, Method, Site, Treatment


def site(index: int) -> Site:
    return Site(f"layer{index}", "linear", 0, 0)


def sites_of(elements: list[int], weights: list[float]) -> list[CodedSite]:
    return coded_sites(
        {site(i): count for i, count in enumerate(elements)},
        {site(i): weight for i, weight in enumerate(weights)},
    )


ELEMENTS = st.lists(st.integers(1, 40_000), min_size=1, max_size=4)


def drawn(elements: list[int], seed: int, share: float) -> tuple[list[CodedSite], int]:
    random = np.random.default_rng(seed)
    sites = sites_of(elements, (10 ** random.uniform(-3, 3, len(elements))).tolist())
    least = sum(min(choice.nbytes for choice in each.choices) for each in sites)
    most = sum(max(choice.nbytes for choice in each.choices) for each in sites)
    return sites, round(least + share * (most - least))


@settings(max_examples=60, deadline=None)
@given(ELEMENTS, st.integers(0, 1000), st.floats(0, 1))
@example([1, 1398, 3565, 24383], 353, 0.875)  # whose best is a ten-thousandth of the worst
def test_least_variance_against_brute_force(elements: list[int], seed: int, share: float) -> None:
    sites, budget = drawn(elements, seed, share)
    found = least_variance(sites, budget)
    assert found.nbytes <= budget
    fitting = [
        sum(choice.variance for choice in each)
        for each in product(*(each.choices for each in sites))
        if sum(choice.nbytes for choice in each) <= budget
    ]
    assert found.bound <= min(fitting) * (1 + 1e-9) + 1e-12
    assert min(fitting) <= found.variance * (1 + 1e-9) + 1e-12
    assert found.variance <= (1 + 2 * RELATIVE_GAP) * min(fitting) + 1e-9


@settings(max_examples=40, deadline=None)
@given(ELEMENTS, st.integers(0, 1000), st.floats(1e-4, 1))
@example([13], 0, 1 - 1e-12)
def test_least_bytes_against_brute_force(elements: list[int], seed: int, share: float) -> None:
    sites, _ = drawn(elements, seed, 0.5)
    limit = share * sum(max(choice.variance for choice in each.choices) for each in sites)
    found = least_bytes(sites, limit)
    assert found.variance <= limit * (1 + 1e-9)
    fitting = [
        sum(choice.nbytes for choice in each)
        for each in product(*(each.choices for each in sites))
        if sum(choice.variance for choice in each) <= limit
    ]
    assert found.bound <= min(fitting) * (1 + 1e-9)
    assert found.nbytes <= 1.35 * min(fitting)
    chosen = [found.treatments[each.site] for each in sites]
    by_treatment = [{choice.treatment: choice for choice in each.choices} for each in sites]
    taken = [choices[treatment] for choices, treatment in zip(by_treatment, chosen, strict=True)]
    assert found.nbytes == sum(choice.nbytes for choice in taken)
    assert found.variance == pytest.approx(sum(choice.variance for choice in taken))


def exact_variance(sites: list[CodedSite], budget: int) -> float:
    """By HiGHS."""
    columns = [(i, choice) for i, each in enumerate(sites) for choice in each.choices]
    one_each = np.array([[i == j for i, _ in columns] for j in range(len(sites))], float)
    nbytes = np.array([[choice.nbytes for _, choice in columns]], float)
    variance = np.array([choice.variance for _, choice in columns])
    solved = milp(
        variance,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(nbytes, 0, budget)],
        bounds=Bounds(0, 1),
        integrality=np.ones(len(columns)),
        options={"mip_rel_gap": 1e-6},
    )
    assert solved.success
    return float(solved.fun)


@pytest.mark.parametrize("seed", range(4))
def test_many_sites_come_within_a_hundredth_of_the_integer_program(seed: int) -> None:
    random = np.random.default_rng(seed)
    elements = random.integers(1000, 400_000, 30).tolist()
    weights = (10 ** random.uniform(-2, 2, 30)).tolist()
    sites = sites_of(elements, weights)
    budget = int(sum(elements) * 2.2 / 8)
    found = least_variance(sites, budget)
    best = exact_variance(sites, budget)
    assert found.bound <= best * (1 + 1e-5)
    assert found.variance <= 1.01 * best
    assert found.variance < 0.8 * uniform(sites, budget).variance


def test_more_weight_never_means_fewer_bits() -> None:
    found = least_variance(sites_of([4096] * 6, [1, 3, 10, 30, 100, 300]), 6 * 4096 * 2 // 8 + 600)
    order = [STANDARD_TREATMENTS.index(found.treatments[site(index)]) for index in range(6)]
    assert order == sorted(order)
    assert len(set(order)) > 1


def test_ample_bytes_keep_everything() -> None:
    sites = sites_of([256, 512], [1.0, 2.0])
    found = least_variance(sites, 4 * 768)
    assert set(found.treatments.values()) == {KEEP}
    assert (found.nbytes, found.variance) == (4 * 768, 0.0)


def test_bytes_and_variances_are_those_of_the_format() -> None:
    (each,) = sites_of([2560], [7.0])
    two = next(choice for choice in each.choices if choice.treatment.bits == 2)
    assert two.nbytes == 2560 * 2 // 8 + 10 * 4
    assert two.variance == pytest.approx(7.0 * rotated_error(2, 2))
    assert held_bytes(2560, KEEP) == 10_240


def test_what_cannot_be_had_is_refused() -> None:
    sites = sites_of([2560], [1.0])
    with pytest.raises(BudgetError, match="the smallest take") as caught:
        least_variance(sites, 100)
    assert caught.value.least_bytes == 2560 // 8 + 40
    with pytest.raises(BudgetError, match="one width everywhere"):
        uniform(sites, 100)
    one_bit = CodedSite(site(0), (Choice(Treatment(Method.ROTATED, 1), 10, 5.0),))
    with pytest.raises(DataError, match="let tensors be kept"):
        least_bytes([one_bit], 1.0)
    with pytest.raises(DataError, match="have no sensitivity"):
        coded_sites({site(0): 5}, {})


def test_uniform_takes_one_width() -> None:
    sites = sites_of([2560, 5120], [1.0, 100.0])
    found = uniform(sites, held_bytes(2560, STANDARD_TREATMENTS[2]) * 3)
    assert set(found.treatments.values()) == {Treatment(Method.ROTATED, 3)}


def test_actnn_by_hand() -> None:
    """Two equal tensors, one a thousand times as sensitive, 3 bits on average.

    Losses of the lesser from 8 down to 1 bit are all below the greater's first below 5 bits.
    """
    widths = actnn_widths({site(0): 100, site(1): 100}, {site(0): 1000.0, site(1): 1.0}, 3.0)
    assert sum(widths.values()) == 6
    assert widths[site(0)] == 5
    assert widths[site(1)] == 1
    equal = actnn_widths({site(0): 100, site(1): 100}, {site(0): 1.0, site(1): 1.0}, 2.0)
    assert set(equal.values()) == {2}


def test_gact_by_hand() -> None:
    elements = {site(0): 100, site(1): 100, site(2): 100}
    weights = {site(0): 1e4, site(1): 1.0, site(2): 1.0}
    assert gact_widths(elements, weights, 2.0) == {site(0): 4, site(1): 1, site(2): 1}
    assert set(gact_widths(elements, weights, 8.0).values()) == {8}
    with pytest.raises(DataError, match="1 to 8"):
        gact_widths(elements, weights, 0.5)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=12), st.integers(0, 99), st.floats(1, 8)
)
def test_published_greedies_keep_their_average(elements: list[int], seed: int, bits: float) -> None:
    random = np.random.default_rng(seed)
    counts = {site(i): count for i, count in enumerate(elements)}
    weights = {s: float(10 ** random.uniform(-3, 3)) for s in counts}
    for widths in (actnn_widths(counts, weights, bits), gact_widths(counts, weights, bits)):
        assert sum(counts[s] * widths[s] for s in counts) <= bits * sum(elements) * (1 + 1e-12)


def test_actnn_s_sensitivity() -> None:
    assert actnn_sensitivity(
        10.0, 3.0, group_elements=256, pixels=64, kernel_places=9
    ) == pytest.approx(9 / 4 * (10 * 256 / 64) * 3)
