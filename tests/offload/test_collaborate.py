"""Sharing packing: splits on a model of the device; copies beside a device's computation."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daf.core.errors import KernelError, PlatformError
from daf.offload import routing
from daf.offload.routing import Rates, ReadyTensor, Route, simulate, split
from daf.pool.transfers import Transfers

RATE = st.floats(1.0, 1e4)
RATES = st.builds(Rates, RATE, RATE, RATE)
TENSORS = st.lists(st.integers(16, 100_000), min_size=1, max_size=6)
FORWARD_MS = 100.0


def saved(sizes: list[int]) -> list[ReadyTensor]:
    step = FORWARD_MS / (len(sizes) + 1)
    return [ReadyTensor(step * (k + 1), size, size // 8) for k, size in enumerate(sizes)]


@given(TENSORS, RATES)
def test_a_split_is_never_worse_than_either_side_alone_and_mostly_the_best(sizes, rates) -> None:
    tensors = saved(sizes)
    found = split(tensors, rates, FORWARD_MS)
    alone = [simulate(tensors, [route] * len(sizes), rates, FORWARD_MS) for route in Route]
    assert found.exposed_ms <= min(plan.exposed_ms for plan in alone)
    best = min(
        simulate(tensors, routes, rates, FORWARD_MS).exposed_ms
        for routes in itertools.product(Route, repeat=len(sizes))
    )
    assert best <= found.exposed_ms + 1e-9


def test_many_tensors_are_split_in_little_time_and_no_worse_than_either_side() -> None:
    tensors = [ReadyTensor(100.0 * (k + 1) / 500, 1000 + 37 * (k % 11), 100) for k in range(500)]
    rates, tries = Rates(gpu_pack=9000.0, cpu_pack=3000.0, link=9000.0), []
    with pytest.MonkeyPatch.context() as patch:
        own = simulate
        patch.setattr(routing, "simulate", lambda *given_: tries.append(1) or own(*given_))
        found = split(tensors, rates, 100.0)
    assert len(tries) <= 17
    alone = [simulate(tensors, [route] * 500, rates, 100.0) for route in Route]
    assert found.exposed_ms < min(plan.exposed_ms for plan in alone)
    largest = split(tensors, rates, 100.0, most_raw_bytes=1100)
    sizes = {
        t.raw_bytes for t, r in zip(tensors, largest.routes, strict=True) if r is Route.CPU_PACKS
    }
    assert sizes
    assert max(sizes) <= 1100


@given(TENSORS, RATES, st.data())
def test_no_resource_does_two_things_at_once_or_before_they_are_there(sizes, rates, data) -> None:
    routes = data.draw(st.lists(st.sampled_from(Route), min_size=len(sizes), max_size=len(sizes)))
    tensors = saved(sizes)
    timeline = simulate(tensors, routes, rates, FORWARD_MS)
    for resource in ("gpu", "link", "cpu"):
        jobs = [job for job in timeline.jobs if job.resource == resource]
        assert all(one.end_ms <= two.begin_ms + 1e-6 for one, two in itertools.pairwise(jobs))
    for index, tensor in enumerate(tensors):
        chain = [job for job in timeline.jobs if job.saved_index == index]
        assert chain[0].begin_ms >= tensor.ready_ms
        assert all(one.end_ms <= two.begin_ms for one, two in itertools.pairwise(chain))
    last = max(job.end_ms for job in timeline.jobs)
    assert timeline.tail_ms == pytest.approx(max(0, last - FORWARD_MS - timeline.stolen_ms))


def test_a_fast_processor_behind_a_fast_link_hides_everything() -> None:
    found = split(saved([1000] * 5), Rates(10.0, 1e4, 1e4), FORWARD_MS)
    assert set(found.routes) == {Route.CPU_PACKS}
    assert found.exposed_ms == 0


def test_a_slow_link_makes_the_gpu_pack() -> None:
    found = split(saved([100_000] * 5), Rates(1e5, 1e5, 1000.0), FORWARD_MS)
    assert set(found.routes) == {Route.GPU_PACKS}


def test_where_neither_alone_is_hidden_the_split_is_mixed_and_better() -> None:
    tensors = saved([30_000] * 6)
    rates = Rates(gpu_pack=4000.0, cpu_pack=1500.0, link=20_000.0)
    found = split(tensors, rates, FORWARD_MS)
    alone = [simulate(tensors, [route] * 6, rates, FORWARD_MS).exposed_ms for route in Route]
    assert set(found.routes) == set(Route)
    assert found.exposed_ms < 0.7 * min(alone)


def test_shared_memory_is_a_link_that_takes_no_time() -> None:
    rates = Rates(10.0, 1e4, math.inf)
    timeline = simulate(saved([1000]), [Route.CPU_PACKS], rates, FORWARD_MS)
    link = next(job for job in timeline.jobs if job.resource == "link")
    assert link.begin_ms == link.end_ms
    assert rates.observed("link", 10, 1.0) == rates


def test_rates_follow_what_is_measured() -> None:
    rates = Rates(10.0, 20.0, 30.0)
    for _ in range(40):
        rates = rates.observed("cpu_pack", 500, 10.0)
    assert rates.cpu_pack == pytest.approx(50.0, rel=1e-3)
    assert (rates.gpu_pack, rates.link) == (10.0, 30.0)
    with pytest.raises(KernelError, match="above 0"):
        Rates(0.0, 1.0, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is missing without a GPU")
def test_transfers_without_a_gpu_are_refused() -> None:
    with pytest.raises(PlatformError, match="found no CUDA device"):
        Transfers(torch.device("cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_out_and_back_beside_the_computation() -> None:
    transfers = Transfers(torch.device("cuda"))
    source = torch.arange(2**20, device="cuda", dtype=torch.int32)
    expected = source.cpu()
    before = transfers.mark()
    copy, ticket = transfers.out(source)
    transfers.order(ticket)  # so that its memory may be written over
    source.fill_(-1)
    torch.cuda.synchronize()
    assert transfers.is_done(ticket)
    assert torch.equal(copy, expected)
    assert 0 < transfers.duration_ms(ticket) <= transfers.elapsed_ms(before, ticket)
    ticket = transfers.back(copy, source)
    transfers.order(ticket)
    assert torch.equal((source + 1).cpu(), expected + 1)
