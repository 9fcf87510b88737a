"""Activations that go as a whole: the least important first, zeros in their place, no more."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import daf
from daf.codecs.coder import Coder
from daf.codecs.codes import ValueCode
from daf.core.errors import OptionError
from daf.core.policy import Method, Treatment, ranged_policy
from daf.pool.paged_pool import PagedStore, make_store
from daf.pool.store import PoolOptions

COUNT = 2**20
TWO_BITS, EIGHT_BITS = Treatment(Method.ROTATED, 2), Treatment(Method.MINMAX, 8)


def whole_store(cap_bytes: int | None = None) -> PagedStore:
    return PagedStore(cap_bytes, whole=True)


def coded(
    store: PagedStore, weight: float, treatment: Treatment = TWO_BITS
) -> tuple[ValueCode, torch.Tensor]:
    tensor = torch.randn(COUNT, generator=torch.Generator().manual_seed(int(weight)))
    return Coder(store).values(tensor, treatment, 1, None, weight=weight), tensor


def decoded(code: ValueCode) -> torch.Tensor:
    out = torch.full((COUNT,), 7.0)
    code.decode(out)
    return out


@pytest.mark.parametrize("treatment", [TWO_BITS, EIGHT_BITS])
def test_the_least_important_goes_as_a_whole_and_reads_as_zeros(treatment: Treatment) -> None:
    code_bytes = coded(whole_store(), 1.0, treatment)[0].nbytes
    store = whole_store(int(2.6 * code_bytes))
    codes = [coded(store, weight, treatment) for weight in (3.0, 1.0, 2.0)]
    header_bytes = COUNT // 256 * 4
    assert [code.nbytes for code, _ in codes] == [code_bytes, header_bytes, code_bytes]
    assert store.evicted_bytes == code_bytes - header_bytes
    assert store.live_bytes <= 2.6 * code_bytes
    assert not decoded(codes[1][0]).any()
    for code, tensor in (codes[0], codes[2]):
        error = (decoded(code) - tensor).square().mean() / tensor.square().mean()
        assert 0.0 < error < 0.5


def test_a_lowered_cap_takes_whole_activations_and_tells_which() -> None:
    store = whole_store()
    codes = [coded(store, weight)[0] for weight in (3.0, 1.0, 2.0)]
    given = store.set_cap(store.live_bytes - codes[0].nbytes // 8)  # half a plane would suffice
    assert given.over_bytes == 0
    assert [bool(decoded(code).any()) for code in codes] == [True, False, True]
    planes, unlisted = store.take_evictions()
    assert {each.plane for each in planes} == {0, 1}
    assert len({each.handle for each in planes}) == 1
    assert unlisted == 0


def test_what_is_read_or_exact_stays() -> None:
    store = whole_store()
    code, _ = coded(store, 1.0)
    stays = Coder(store).unwritten_mask(torch.zeros(COUNT))
    with code.planes.pinned() as view:
        assert store.set_cap(1).over_bytes > 0
        assert view.fields.kept == 2
    assert not decoded(code).any()  # it went when nobody read it any more
    assert stays.nbytes > 0


def _network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 8, bias=False)), torch.randn(512, 64), torch.ones(1)


@pytest.mark.parametrize("bits", ["rotated", "ranged"])
def test_gradients_without_an_activation_lack_what_it_adds(bits: str) -> None:
    model, images, _ = _network()
    policy = ranged_policy(4, "tensor") if bits == "ranged" else None
    whole = daf.compress(model, 4, policy=policy)
    with whole:
        model(images * 1.0).sum()
    pool = PoolOptions(int(0.6 * whole.stats.held_peak_bytes), "activations")
    with (door := daf.compress(model, 4, policy=policy, pool_bytes=pool)):
        loss = model(images * 1.0).sum()
    assert door.stats.evicted_bytes > 0
    loss.backward()
    zero = [not each.grad.any() for each in model.parameters() if each.grad is not None]
    assert any(zero)  # some layers' inputs went, with all that they add
    assert not all(zero)


def test_a_session_evicts_whole_activations_from_a_pool_that_grows_by_steps() -> None:
    model, images, _ = _network()
    labels = torch.arange(512) % 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pool = PoolOptions("96 KiB", "activations", "64 KiB")
    session = daf.Session(model, optimizer, None, bits=8, pool_bytes=pool, seed=1)

    def loss_fn(net: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    reports = [session.step((images, labels), loss_fn) for _ in range(20)]
    assert all(each.evicted_bytes > 0 for each in reports)
    assert reports[-1].loss < reports[0].loss
    assert session.pool_bytes == 96 * 1024
    session.close()


def test_the_pool_grows_by_whole_steps() -> None:
    store = make_store(PoolOptions(growth_bytes="1 MiB"))
    code = Coder(store).unwritten_mask(torch.zeros(256))
    assert store.live_bytes >= 2**20
    assert code.nbytes < 2**20


def test_other_ways_to_evict_are_refused() -> None:
    with pytest.raises(OptionError, match="evicts 'tensors'; give 'planes' or 'activations'"):
        PoolOptions(evicts="tensors")  # type: ignore[arg-type]
