"""Codes in the paged pool: under its cap the least important planes go, and the step finishes."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.errors import PlatformError, PoolFullError, UnitError
from daf.core.policy import Method, Need, Site, coded_policy, policy_for
from daf.pool.paged_pool import PagedStore
from daf.pool.store import PlainStore

WIDTH, BATCH, LAYERS = 256, 1024, 4
PLAIN_BYTES = 4 * WIDTH * BATCH


def network() -> nn.Sequential:
    """Every linear layer but the first saves 512 KiB, which its weight's gradient reads once."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(16, WIDTH)]
    for _ in range(LAYERS):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False)]
    return nn.Sequential(*layers)


def inputs() -> Tensor:
    return torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> Tensor:
    """Its own saves are small or kept, so that the linear layers' inputs are all that is coded."""
    labels = torch.arange(BATCH) % WIDTH
    return F.cross_entropy(model(inputs()), labels)


def pool_of(capture: compress | Capture) -> PagedStore:
    store = (capture._capture if isinstance(capture, compress) else capture)._store
    assert isinstance(store, PagedStore)
    return store


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def one_step(model: nn.Module, capture: compress) -> list[Tensor]:
    with capture:
        loss = loss_of(model)
    loss.backward()
    return gradients(model)


def squared_error(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return sum(float((a - b).square().sum()) for a, b in pairs)


def full_bytes(bits: int | str) -> int:
    """What the pool holds in one step where nothing bounds it."""
    model = network()
    capture = compress(model, bits)
    one_step(model, capture)
    return pool_of(capture).statistics().held_peak_bytes


def test_codes_lie_in_the_pool_and_leave_it() -> None:
    model, store = network(), PagedStore(page_bytes=None, poison=True)
    capture = Capture(model, store)
    for step in range(3):
        with capture.step(policy_for(2), 0, step):
            loss = loss_of(model)
        now = store.statistics()
        assert now.live_tensors == 2 * LAYERS + 1  # a code and a mask for each ReLU, and the labels
        # Two planes, a mask and headers; held are their tables, records and waste as well.
        headers = LAYERS * PLAIN_BYTES // 256
        assert now.payload_bytes == LAYERS * PLAIN_BYTES * 3 // 32 + headers + BATCH
        kept = sum(r.held_bytes for r in capture.sites() if r.treatment.method is Method.KEEP)
        assert capture.stats.held_bytes == now.held_bytes + kept
        loss.backward()
        assert store.statistics().live_tensors == 0
        assert capture.stats.held_bytes == 0
        model.zero_grad()


def test_a_capture_makes_a_pool_of_its_own() -> None:
    first, second = Capture(network()), Capture(network())
    assert pool_of(first) is not pool_of(second)
    assert compress(network(), 2).pool_bytes is None
    assert compress(network(), 2, pool_bytes="3MB").pool_bytes == 3_000_000
    with pytest.raises(UnitError):
        compress(network(), 2, pool_bytes="3 pools")


@pytest.mark.parametrize("bits", [1, 2, 4, 8, "exact"])
def test_the_pool_changes_no_bit_of_a_gradient(bits: int | str) -> None:
    model, found = network(), []
    for store in (PlainStore(), PagedStore(page_bytes=None, poison=True)):
        with Capture(model, store).step(policy_for(bits), 0, 0):
            loss = loss_of(model)
        loss.backward()
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_under_a_cap_the_step_finishes_with_fewer_planes() -> None:
    model = network()
    exact = one_step(model, compress(model, "plain"))
    errors = [squared_error(one_step(model, compress(model, 4)), exact)]
    full = full_bytes(4)
    for share in (0.8, 0.6):
        capture = compress(model, 4, pool_bytes=int(share * full))
        errors.append(squared_error(one_step(model, capture), exact))
        stats = capture.stats
        assert 0.9 * share * full < pool_of(capture).statistics().held_peak_bytes <= share * full
        assert stats.evicted_bytes >= (1 - share) * full - 4096
        assert stats.evicted_planes > 0
        told = sum(report.evicted_bytes for report in capture.sites())
        assert stats.evicted_bytes <= told <= 1.1 * stats.evicted_bytes
    assert errors == sorted(errors)
    assert 2 * errors[0] < errors[-1] < sum(float(g.square().sum()) for g in exact)


def test_gradients_stay_unbiased_with_planes_gone() -> None:
    """Averaging k seeds divides the squared error by k, which a bias would stop."""
    model = network()
    exact, seeds = one_step(model, compress(model, "plain")), 16
    cap = int(0.6 * full_bytes(4))
    samples = []
    for seed in range(seeds):
        capture = compress(model, 4, seed=seed, pool_bytes=cap)
        samples.append(one_step(model, capture))
        assert capture.stats.evicted_planes >= LAYERS
    single = sum(squared_error(sample, exact) for sample in samples) / seeds
    averaged = [torch.stack(parts).mean(0) for parts in zip(*samples, strict=True)]
    assert squared_error(averaged, exact) < 1.3 * single / seeds


def test_the_least_important_site_loses_its_planes_first() -> None:
    model, dear = network(), Site("4", "linear", 0, 1)
    policy = replace(coded_policy(4), weights=MappingProxyType({dear: 1e6}))
    capture = compress(model, policy=policy, pool_bytes=int(0.6 * full_bytes(4)))
    one_step(model, capture)
    lost = {str(r.site): r.evicted_bytes for r in capture.sites() if r.need is Need.LINEAR}
    assert len(lost) == LAYERS
    assert lost.pop(str(dear)) == 0
    assert all(count > 0 for count in lost.values())


def test_masks_and_minmax_codes_are_never_given_up() -> None:
    for bits in (8, "exact"):
        model = network()
        with pytest.raises(PoolFullError, match=r"raise the cap"):
            one_step(model, compress(model, bits, pool_bytes=int(0.9 * full_bytes(bits))))
        gc.collect()
        assert gradients(model) == []
        capture = compress(model, bits, pool_bytes=full_bytes(bits) + 4096)
        one_step(model, capture)
        assert capture.stats.evicted_bytes == 0


def test_what_one_bit_cannot_hold_is_refused_and_leaves_nothing_behind() -> None:
    model = network()
    capture = compress(model, 4, pool_bytes=200_000)
    for _ in range(2):
        with pytest.raises(PoolFullError, match="cap 200000"):
            one_step(model, capture)
        assert capture.stats.held_bytes == 0
    capture.pool_bytes = "8MB"
    one_step(model, capture)
    assert capture.stats.evicted_bytes == 0


def test_a_cap_lowered_between_forward_and_backward_acts_at_once() -> None:
    model = network()
    exact = one_step(model, compress(model, "plain"))
    capture = compress(model, 4)
    with capture:
        loss = loss_of(model)
    before, pool_bytes = capture.stats, pool_of(capture).live_bytes
    assert before.evicted_bytes == 0
    capture.pool_bytes = pool_bytes // 2
    after = capture.stats
    assert pool_of(capture).live_bytes <= pool_bytes // 2
    assert before.held_bytes - after.held_bytes >= pool_bytes // 2
    assert after.evicted_bytes >= pool_bytes // 2 - 2 * 4096
    assert after.held_peak_bytes == before.held_peak_bytes
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    second = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert 0 < squared_error(first, exact) < sum(float(g.square().sum()) for g in exact)
    # The next step's report begins anew.
    capture.pool_bytes = None
    one_step(model, capture)
    assert capture.stats.evicted_bytes == capture.stats.evicted_planes == 0


def test_plain_buffers_cannot_be_capped_afterwards() -> None:
    capture = Capture(network(), PlainStore())
    assert capture.pool_bytes is None
    with pytest.raises(PlatformError, match="ulimit"):
        capture.pool_bytes = 10**6


def test_derivative_codes_and_norms_survive_a_cap() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256))
    capture = compress(model, 4)
    with capture:
        loss = F.mse_loss(model(inputs()), torch.zeros(BATCH, 256))
    capture.pool_bytes = pool_of(capture).live_bytes * 3 // 4
    lost = {r.treatment.method for r in capture.sites() if r.evicted_bytes}
    assert lost == {Method.ROTATED}
    loss.backward()
    assert all(bool(torch.isfinite(g).all()) for g in gradients(model))
