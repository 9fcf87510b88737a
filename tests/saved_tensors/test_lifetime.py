"""Nothing outlives its use: tensors, graphs, codes and the account."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from simulated_memory import WatchedStore
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.errors import CodecError
from daf.core.policy import Method, Need, Policy, Treatment, policy_for
from daf.pool.store import PlainStore
from daf.saved_tensors.ledger import Ledger, Sources

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("code_everything")]

POLICIES = ["plain", "exact", 2]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.GELU(),
        nn.Flatten(),
    )


@pytest.mark.parametrize("bits", POLICIES)
def test_saved_tensors_die_without_the_garbage_collector(bits: int | str) -> None:
    model = network()
    seen: list[weakref.ref[Tensor]] = []
    for module in model:
        module.register_forward_hook(lambda *call: seen.append(weakref.ref(call[2])))
    gc.collect()
    gc.disable()
    try:
        capture = compress(model, bits)
        with capture:
            loss = model(torch.randn(2, 3, 8, 8)).sum()
        loss.backward()
        del loss
        assert len(seen) == 6
        assert [reference() for reference in seen] == [None] * 6
        assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("bits", POLICIES)
def test_a_graph_dropped_without_backward_gives_everything_back(bits: int | str) -> None:
    model, store = network(), PlainStore()
    capture = Capture(model, store)
    gc.collect()
    gc.disable()
    try:
        with capture.step(policy_for(bits), 0, 0):
            loss = model(torch.randn(2, 3, 8, 8)).sum()
        assert capture.stats.held_bytes > 0
        del loss
        assert capture.stats.held_bytes == capture.stats.plain_bytes == store.live_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bits", POLICIES)
def test_a_model_that_keeps_a_result_goes_when_nobody_holds_it(
    bits: int | str, fused: bool
) -> None:
    """Autograd's graph keeps the hooks, unseen by the collector; they must not keep the model."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.inner(x)
            return self.last

    model = Remembering()
    capture = compress(model, bits, fused=fused, chunked=fused)
    for _ in range(2):
        with capture:
            loss = model(torch.randn(2, 3, 8, 8)).sum()
    alive = weakref.ref(model)
    del model, capture, loss
    gc.collect()
    assert alive() is None


def test_a_policy_that_raises_leaves_no_cycle() -> None:
    model = network()
    seen: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda *call: seen.append(weakref.ref(call[2])))
    policy = Policy("unsound", {Need.SIGN: Treatment(Method.ROTATED, 2)})
    capture = compress(model, policy=policy)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CodecError), capture:
            model(torch.randn(2, 3, 8, 8))
        assert [reference() for reference in seen] == [None]
        assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    finally:
        gc.enable()


def test_the_store_holds_what_the_account_says() -> None:
    model, store = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), WatchedStore()
    capture = Capture(model, store)
    with capture.step(policy_for(2), 0, 0):
        loss = model(torch.randn(32, 64)).sum()
    assert store.live_bytes == capture.stats.held_bytes > 0
    loss.backward()
    assert store.live_bytes == 0
    assert store.peak_bytes == capture.stats.held_peak_bytes


def test_the_account_falls_as_backward_goes() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    capture = compress(model, 2)
    left: list[tuple[int, int]] = []
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: left.append((capture.stats.plain_bytes, capture.stats.held_bytes))
        )
    with capture:
        loss = model(torch.randn(32, 64)).sum()
    everything = (capture.stats.plain_bytes, capture.stats.held_bytes)
    loss.backward()
    assert left[-1] == (0, 0)
    assert everything > left[0] > left[1] > left[2]


def test_plain_bytes_are_what_autograd_really_holds() -> None:
    """Counted independently: every storage that an ordinary hook sees, once, while it lives."""
    model, x = network(), torch.randn(2, 3, 8, 8)
    own = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers(), x]}
    storages: dict[int, torch.UntypedStorage] = {}

    def look(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # keeps it, so no address is used twice
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        model(x).sum()
    expected = sum(s.nbytes() for address, s in storages.items() if address not in own)
    capture = compress(model, 2)
    with capture:
        loss = model(x).sum()
    assert capture.stats.plain_peak_bytes == expected
    del loss


def test_kept_and_plain_agree_when_nothing_is_coded() -> None:
    model = network()
    capture = compress(model, "plain")
    with capture:
        loss = F.mse_loss(model(torch.randn(2, 3, 8, 8)), torch.zeros(2, 8 * 16))
    stats = capture.stats
    assert stats.plain_bytes == stats.held_bytes > 0
    assert sum(r.plain_bytes for r in capture.sites()) == stats.plain_bytes
    assert sum(r.held_bytes for r in capture.sites()) == stats.held_bytes
    loss.backward()


def test_peaks_begin_anew_with_every_step_and_not_with_a_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    capture = Capture(model, PlainStore())

    def run(examples: int, step_index: int, micro_index: int) -> None:
        with capture.step(policy_for(2), 0, step_index, micro_index):
            loss = model(torch.randn(examples, 64)).sum()
        loss.backward()

    run(64, 0, 0)
    large = capture.stats.held_peak_bytes
    run(32, 0, 1)
    assert capture.stats.held_peak_bytes == large
    run(32, 1, 0)
    assert capture.stats.held_peak_bytes == large // 2


def test_a_source_is_found_by_its_storage_and_never_by_a_reused_address() -> None:
    ledger = Ledger()
    sources = Sources(ledger)
    tensor = torch.randn(1000)
    source = sources.of(tensor)
    assert sources.of(tensor[10:]) is source
    assert ledger.plain_bytes == 0
    plain = source.plain()
    assert source.plain() is plain
    assert ledger.plain_bytes == 4000
    del tensor
    others = [torch.randn(1000) for _ in range(50)]
    assert all(sources.of(other) is not source for other in others)
    del plain
    assert ledger.plain_bytes == 0
