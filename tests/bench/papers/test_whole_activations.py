"""Activations that go as a whole: the least important first, zeros in their place, no more."""

from __future__ import annotations

import pytest
import torch
from daf_bench.papers.whole_activations import WholeStore

import daf
from daf.capture import compress
from daf.codecs.coder import Coder
from daf.codecs.codes import ValueCode
from daf.core.policy import Method, Treatment

COUNT = 2**20
TWO_BITS, STAYING = Treatment(Method.ROTATED, 2), Treatment(Method.MINMAX, 2)


def coded(
    store: WholeStore, weight: float, treatment: Treatment = TWO_BITS
) -> tuple[ValueCode, torch.Tensor]:
    tensor = torch.randn(COUNT, generator=torch.Generator().manual_seed(int(weight)))
    return Coder(store).values(tensor, treatment, 1, None, weight=weight), tensor


def decoded(code: ValueCode) -> torch.Tensor:
    out = torch.full((COUNT,), 7.0)
    code.decode(out)
    return out


def test_the_least_important_goes_as_a_whole_and_reads_as_zeros() -> None:
    store = WholeStore(10 * COUNT)
    code_bytes = coded(store, 1.0)[0].nbytes
    store = WholeStore(int(2.6 * code_bytes))
    codes = [coded(store, weight) for weight in (3.0, 1.0, 2.0)]
    assert [code.nbytes for code, _ in codes] == [code_bytes, 0, code_bytes]
    assert store.evicted_bytes == code_bytes
    assert store.live_bytes <= 2.6 * code_bytes
    assert not decoded(codes[1][0]).any()
    for code, tensor in (codes[0], codes[2]):
        error = (decoded(code) - tensor).square().mean() / tensor.square().mean()
        assert 0.0 < error < 0.5


def test_what_the_pool_would_keep_stays_and_so_does_what_is_read() -> None:
    store = WholeStore(0)
    code, _ = coded(store, 1.0, STAYING)
    assert code.nbytes > 0
    assert decoded(code).any()
    assert store.evicted_bytes == 0


def test_what_is_freed_is_forgotten() -> None:
    store = WholeStore(10 * COUNT)
    code, _ = coded(store, 1.0)
    del code
    assert not store._evictable
    assert store.give_back(1) >= 0
    assert store.take_evictions() == ((), 0)


def test_gradients_without_an_activation_lack_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(64, 8, bias=False)
    images = torch.randn(512, 64).requires_grad_()
    monkeypatch.setattr(compress, "make_store", lambda _cap: WholeStore(0))
    with daf.compress(model, bits=2, pool_bytes=1):
        loss = model(images * 1.0).sum()
    loss.backward()
    assert not model.weight.grad.any()  # its input went
    assert images.grad is not None
    assert images.grad.any()  # what the weight gives is there
