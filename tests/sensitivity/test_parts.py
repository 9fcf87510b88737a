"""Sketches, the separation of sites, the prior's formula and the errors of codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from daf.kernels.code_errors import GAUSSIAN_BLOCK_SQUARED_RANGE, minmax_error, relative_error
from daf.kernels.tables import rotated_error
from daf.plan import Method, Treatment
from daf.sensitivity.prior import energy_beside_means
from daf.sensitivity.schedule import Schedule
from daf.sensitivity.separate import random_draws, separate
from daf.sensitivity.sketch import GradientSketcher, sample_variance


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


def gradients_of(
    noise: np.ndarray, redrawn: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """(passes, passes) squared distances of sums of independent Gaussian vectors."""
    sites = redrawn.shape[1]
    vectors = generator.standard_normal((3, sites, 400)) * np.sqrt(noise / 400)[None, :, None]
    gradients = np.stack([sum(vectors[int(row[s]), s] for s in range(sites)) for row in redrawn])
    return np.square(gradients[:, None] - gradients[None]).sum(-1)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 20), st.integers(0, 10_000))
def test_sites_are_separated(sites: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    noise = 10 ** generator.uniform(-1, 1, sites)
    redrawn = np.vstack([np.zeros((1, sites), int), random_draws(sites, 10, seed)])
    distances = gradients_of(noise, redrawn, generator)
    flat = np.full(sites, noise.mean())
    found = separate(redrawn, distances, np.full(sites, 2.0), flat, np.full(sites, 10.0))
    assert (found.values >= 0).all()
    assert found.values.sum() == pytest.approx(noise.sum(), rel=0.35)
    assert (np.abs(found.values - noise) < 6 * found.standard_errors + 0.2 * noise).all()


def test_what_no_row_tells_apart_follows_the_prior() -> None:
    redrawn = np.array([[0, 0], [1, 1], [1, 1]])
    distances = np.array([[0.0, 8.0, 8.0], [8.0, 0.0, 0.0], [8.0, 0.0, 0.0]])
    change = np.full(2, 2.0)
    found = separate(redrawn, distances, change, np.array([3.0, 1.0]), np.ones(2))
    np.testing.assert_allclose(found.values, [3.0, 1.0], rtol=0.02)
    assert found.standard_errors[0] > 0.2 * 3.0


def test_every_site_takes_at_least_two_draws() -> None:
    for sites, passes in ((1, 1), (2, 1), (9, 2), (40, 3)):
        chosen = random_draws(sites, passes, seed=1)
        assert chosen.any(0).all()
        assert chosen.shape == (passes, sites)
        assert set(chosen.flatten().tolist()) <= {0, 1, 2}


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
        schedule.note_step(step_ms)
        if schedule.allows(cost + planning):
            schedule.note_measurement(cost)
            schedule.note_plan(planning / 2)
            schedule.note_search(planning / 2)
            measured += 1
        assert measured * (cost + planning) <= 0.02 * schedule.trained_ms * (1 + 1e-9)
