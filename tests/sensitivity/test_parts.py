"""Sketches, which sites are alike, the prior's formula and the errors of codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from daf.core.code_errors import GAUSSIAN_BLOCK_SQUARED_RANGE, minmax_error, relative_error
from daf.core.code_tables import rotated_error
from daf.core.policy import Method, Site, Treatment
from daf.sensitivity.gradient_passes import GradientSketcher, sample_variance
from daf.sensitivity.prior import energy_beside_means
from daf.sensitivity.site_groups import alike_groups
from daf.sensitivity.tracker import Schedule


def test_sketched_distances_are_right() -> None:
    parameter = nn.Parameter(torch.zeros(40_000))
    sketcher = GradientSketcher([parameter])
    ratios = []
    for _ in range(24):
        one, other = torch.randn(2, 40_000)
        distance = (sketcher.fold(0, one) - sketcher.fold(0, other)).square().sum()
        ratios.append(float(distance / (one - other).square().sum()))
    # A standard deviation of sqrt(2 / 509) = 6 % each.
    assert abs(np.mean(ratios) - 1) < 4 * 0.063 / np.sqrt(len(ratios))
    assert np.std(ratios) < 0.12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_chunks_of_a_large_gradient_have_signs_of_their_own(dtype: torch.dtype) -> None:
    chunk_elements, chunks = 512 * 509, 5
    sketcher = GradientSketcher([nn.Parameter(torch.zeros(chunk_elements * chunks))])
    ratios = []
    for _ in range(8):
        gradient = torch.randn(chunk_elements).repeat(chunks).to(dtype)
        length = gradient.double().square().sum()
        ratios.append(float(sketcher.fold(0, gradient).square().sum() / length))
    # Were they the same, equal chunks would add up to the number of chunks times the length. A
    # standard deviation of sqrt(4 / 509) = 9 % each.
    assert abs(np.mean(ratios) - 1) < 4 * 0.089 / np.sqrt(len(ratios))


def test_large_constant_gradients_are_sketched_as_well_as_others() -> None:
    sketcher, ratios = GradientSketcher([nn.Parameter(torch.zeros(1))]), []
    for chunks in range(8, 72, 8):
        gradient = torch.ones(chunks * 512 * 509)
        ratios.append(float(sketcher.fold(chunks, gradient).square().sum() / len(gradient)))
    # Neighbouring buckets of chunks with the same signs would deviate together.
    assert abs(np.mean(ratios) - 1) < 4 * 0.089 / np.sqrt(len(ratios))


def test_complex_gradients_count_as_pairs() -> None:
    sketcher = GradientSketcher([nn.Parameter(torch.zeros(40_000, dtype=torch.complex64))])
    gradient = torch.randn(40_000, dtype=torch.complex64)
    length = torch.view_as_real(gradient).double().square().sum()
    assert float(sketcher.fold(0, gradient).square().sum() / length) == pytest.approx(1, abs=0.25)


def test_sketches_are_linear_and_small_ones_are_copies() -> None:
    parameter = nn.Parameter(torch.zeros(3000))
    sketcher = GradientSketcher([parameter])
    one, other = torch.randn(2, 3000)
    both = sketcher.fold(0, one) + 2 * sketcher.fold(0, other)
    torch.testing.assert_close(both, sketcher.fold(0, one.double() + 2 * other.double()))
    small = torch.randn(20, 25)
    assert torch.equal(sketcher.fold(0, small)[:500], small.double().flatten())


def test_parameters_have_signs_of_their_own() -> None:
    sketcher = GradientSketcher([nn.Parameter(torch.zeros(3000))] * 2)
    gradient = torch.randn(3000)
    assert not torch.equal(sketcher.fold(0, gradient), sketcher.fold(1, gradient))


def test_a_sketched_backward_leaves_grad_alone() -> None:
    model = nn.Linear(64, 32)
    model.weight.grad = before = torch.ones(32, 64)
    loss = model(torch.randn(5, 64)).square().sum()
    sketcher = GradientSketcher([model.weight, model.bias])
    sketch = sketcher.gradient_sketch(loss)
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones(32, 64))
    assert model.bias.grad is None
    model.weight.grad = None
    loss = model(torch.randn(5, 64)).square().sum()
    loss.backward()
    again = torch.stack([sketcher.fold(0, model.weight.grad), sketcher.fold(1, model.bias.grad)])
    assert sketch.shape == again.shape == (2, 509)


def test_unused_and_tied_parameters_are_sketched_once() -> None:
    tied, unused = nn.Parameter(torch.randn(30, 30)), nn.Parameter(torch.randn(3))
    x = torch.randn(4, 30)
    sketcher = GradientSketcher([tied, unused], buckets=1000)
    sketch = sketcher.gradient_sketch(((x @ tied) @ tied).sum())
    (expected,) = torch.autograd.grad(((x @ tied) @ tied).sum(), [tied])
    torch.testing.assert_close(sketch[0, :900], expected.flatten().double())
    assert not sketch[1].any()


def layers(count: int, *places: tuple[str, int]) -> list[Site]:
    return [
        Site(f"encoder.layer.{layer}.attention", operator, 0, save)
        for layer in range(count)
        for operator, save in places
    ]


def test_as_far_as_there_are_passes_every_site_is_alone() -> None:
    sites = layers(4, ("softmax", 0), ("matmul", 1))
    found = alike_groups(sites, 8)
    assert sorted(found, key=lambda group: sites.index(group[0])) == [(site,) for site in sites]


def test_neighbours_of_one_role_share_a_pass() -> None:
    sites = [*layers(6, ("softmax", 0), ("matmul", 1)), Site("head", "layer_norm", 0, 0)]
    softmax, matmul, head = sites[0:12:2], sites[1:12:2], sites[12:]
    expected = [softmax[:2], softmax[2:4], softmax[4:], matmul[:2], matmul[2:4], matmul[4:], head]
    assert alike_groups(sites, 8) == list(map(tuple, expected))


def test_layers_have_numbers_and_norms_of_one_layer_have_names() -> None:
    first, second = (
        [Site(f"layers.{layer}.norm{name}", "layer_norm", 0, 1) for layer in range(4)]
        for name in (1, 2)
    )
    sites = [site for pair in zip(first, second, strict=True) for site in pair]
    groups = [first[:2], first[2:], second[:2], second[2:]]
    assert alike_groups(sites, 4) == list(map(tuple, groups))


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 50))
def test_groups_are_all_sites_once_and_no_more_than_asked(
    count: int, roles: int, most: int
) -> None:
    sites = layers(count, *((f"operator{role}", role) for role in range(roles)))
    found = alike_groups(sites, most)
    assert len(found) <= most
    assert all(found)
    assert sorted(map(str, (site for group in found for site in group))) == sorted(map(str, sites))
    if most >= roles:
        assert all(len({site.save for site in group}) == 1 for group in found)


def test_sample_variance_is_that_of_every_bucket() -> None:
    sketches = [torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.0]])]
    assert sample_variance(sketches).tolist() == [[2.0, 0.0]]


def test_energy_is_what_is_left_beside_the_blocks_means() -> None:
    x = torch.cat([torch.randn(256) + 5, torch.randn(256) - 3, torch.randn(100) + 1])
    parts = x.split(256)
    expected = sum(float((p - p.mean()).square().sum()) for p in parts)
    assert energy_beside_means(x) == pytest.approx(expected, rel=1e-5)


def test_errors_of_codes_are_those_of_the_design() -> None:
    """Design, section 4: the table of relative errors."""
    published = {1: 7.0, 2: 0.60, 3: 0.11, 4: 0.024}
    for bits, error in published.items():
        assert minmax_error(bits) == pytest.approx(error, rel=0.06)
    assert relative_error(Treatment(Method.ROTATED, 2)) == rotated_error(2, 2)
    assert relative_error(Treatment(Method.MASK, 1)) == 0.0


def test_the_range_of_a_gaussian_block() -> None:
    samples = np.random.default_rng(0).standard_normal((20_000, 256))
    squared = np.square(np.ptp(samples, axis=1))
    error = squared.std() / np.sqrt(len(squared))
    assert abs(squared.mean() - GAUSSIAN_BLOCK_SQUARED_RANGE) < 4 * error


@given(
    st.lists(st.floats(1, 1000), min_size=1, max_size=300), st.floats(1, 5000), st.floats(0, 5000)
)
def test_measuring_and_planning_stay_within_their_share(
    steps: list[float], cost: float, planning: float
) -> None:
    schedule = Schedule()
    measured = 0
    for step_ms in steps:
        schedule.trained_ms += step_ms
        if schedule.allows(cost + planning):
            schedule.measured_ms += cost
            schedule.planned_ms += planning
            schedule.plans += 1
            measured += 1
        assert measured * (cost + planning) <= 0.02 * schedule.trained_ms * (1 + 1e-9)
