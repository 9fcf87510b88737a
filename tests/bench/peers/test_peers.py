"""The peers train as plain PyTorch does, each by its own means, and their bytes are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from daf_bench.accuracy.published_allocation import gact_policy, minmax_policy
from daf_bench.harness import peer_methods
from daf_bench.harness.initial_weights import FirstState
from daf_bench.harness.peer_methods import Setting, make_peer
from daf_bench.harness.saved_bytes import SavedBytes
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import PlatformError, UnknownNameError
from daf.core.policy import Method, Need, plain_policy

Batch = tuple[Tensor, Tensor]
BLOCKS = ("0.0", "0.1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.inner(x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(16, 4))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 16, generator=generator)
    return x, torch.randint(0, 4, (4096,), generator=generator)


def trained(name: str, amount: float, batch: Batch, steps: int = 3) -> tuple[nn.Module, Any, Any]:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    setting = Setting(made, optimizer, loss_fn, BLOCKS)
    peer = make_peer(name, setting, amount)
    return made, [peer.step(batch) for _ in range(steps)], peer


def calls(model: nn.Module) -> list[int]:
    return [model.get_submodule(path).calls for path in BLOCKS]


def test_checkpointing_runs_blocks_twice_and_changes_nothing(batch: Batch) -> None:
    plain, losses, _ = trained("plain", 0, batch)
    theirs, same_losses, _ = trained("checkpoint", 1.0, batch)
    assert same_losses == losses
    for one, other in zip(plain.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert calls(plain) == [3, 3]
    assert calls(theirs) == [6, 6]
    assert calls(trained("checkpoint", 0.5, batch)[0]) == [6, 3]


def test_without_blocks_there_is_nothing_to_checkpoint(batch: Batch) -> None:
    with pytest.raises(PlatformError, match="no blocks"):
        make_peer("checkpoint", Setting(nn.Linear(2, 2), None, loss_fn), 1.0)  # type: ignore[arg-type]


def test_the_compiler_stays_out_and_nothing_changes(batch: Batch) -> None:
    plain, losses, _ = trained("plain", 0, batch)
    theirs, same_losses, _ = trained("no-compiler", 0, batch)
    assert same_losses == losses
    assert all(map(torch.equal, plain.parameters(), theirs.parameters()))


def test_accumulation_adds_up_to_the_whole_batch_also_when_pieces_differ(batch: Batch) -> None:
    ragged = batch[0][:1000], batch[1][:1000]
    plain, losses, _ = trained("plain", 0, ragged)
    theirs, near, _ = trained("accumulate", 3, ragged)
    assert near == pytest.approx(losses, rel=1e-5)
    for one, other in zip(plain.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_one_example_is_not_cut_into_pieces(batch: Batch) -> None:
    with pytest.raises(PlatformError, match="one example"):
        trained("accumulate", 4, (batch[0][:1], batch[1][:1]))


def test_disk_holds_large_tensors_in_files_while_they_are_wanted(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_methods.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    seen: list[int] = []

    def counting_loss(model: nn.Module, batch: Batch) -> Tensor:
        loss = loss_fn(model, batch)
        seen.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        return loss

    made = model()
    setting = Setting(made, torch.optim.SGD(made.parameters(), lr=0.1), counting_loss)
    losses = [make_peer("disk", setting, 0).step(batch)]
    assert losses == trained("plain", 0, batch, steps=1)[1]
    assert seen[0] > 2 * 4096 * 64 * 4  # at least both hidden layers
    assert list(tmp_path.iterdir()) == []


def test_minmax_codes_every_float_alike_and_counts_what_it_holds(batch: Batch) -> None:
    policy = minmax_policy(2)
    assert policy.by_need[Need.LINEAR].method is Method.MINMAX
    assert policy.by_need[Need.SIGN].method is Method.MASK
    assert not policy.rederive
    _, losses, peer = trained("minmax", 2, batch)
    plain = trained("plain", 0, batch)[1]
    assert losses[0] == plain[0]  # the forward pass is untouched
    assert losses[1] != plain[1]
    held = peer.saved_peak_bytes()
    assert 0 < held < 4 * 4096 * (16 * 2 + 64 * 2) * 0.3


def test_gact_gives_widths_by_sensitivity_and_keeps_to_the_mean(batch: Batch) -> None:
    made = model()
    before = [parameter.clone() for parameter in made.parameters()]
    policy = gact_policy(2, made, loss_fn, batch)
    assert all(map(torch.equal, made.parameters(), before))
    widths = [treatment.bits for treatment in policy.by_site.values()]
    assert {treatment.method for treatment in policy.by_site.values()} == {Method.MINMAX}
    assert set(widths) <= {1, 2, 4, 8}
    assert len(set(widths)) > 1
    uniform, allocated = (trained(name, 2, batch)[2] for name in ("minmax", "gact"))
    assert allocated.saved_peak_bytes() < 1.1 * uniform.saved_peak_bytes()


def saved(name: str, amount: float, batch: Batch) -> int:
    made = model()
    setting = Setting(made, torch.optim.SGD(made.parameters(), lr=0.1), loss_fn, BLOCKS)
    peer = make_peer(name, setting, amount)
    assert peer.saves_by_autograd
    counted = SavedBytes(made, batch)
    with counted.hooks():
        peer.step(batch)
    return counted.peak_bytes


def test_saved_bytes_are_counted_by_storage_without_parameters_and_batch(batch: Batch) -> None:
    rows = 4096 * 4
    hidden, block_output, scores = 64 * rows, 16 * rows, 4 * rows
    # Of a block its ReLU's result serves the layer behind it; of the loss scores and its weight.
    plain = saved("plain", 0, batch)
    assert plain == 2 * hidden + 2 * block_output + scores + 4
    assert saved("checkpoint", 1.0, batch) == plain - 2 * hidden
    assert saved("accumulate", 4, batch) == pytest.approx(plain / 4, rel=0.001)
    made = model()
    capture = Capture(made)
    with capture.step(plain_policy(), seed=0, step_index=0, batch=batch):
        loss_fn(made, batch)
    assert capture.stats.plain_peak_bytes == plain  # as DAF itself counts


def test_what_a_block_holds_while_it_is_computed_again_counts_too(batch: Batch) -> None:
    rows = 4096 * 4
    made, _, peer = trained("checkpoint", 1.0, batch, steps=0)
    counted = SavedBytes(made, batch)
    peer.counts_in(counted)
    with counted.hooks():
        loss = peer.step(batch)
    # The second block's input, and its ReLU's result; what came behind it is gone by then.
    assert counted.peak_bytes == 16 * rows + 64 * rows
    plain, losses, _ = trained("plain", 0, batch, steps=1)
    assert losses == [loss]
    for one, other in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.equal(one, other)


def test_first_weights_come_back_from_disk_with_their_random_state() -> None:
    made = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).to(
        memory_format=torch.channels_last
    )
    first = FirstState(made)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    drawn = torch.rand(4)
    made(torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        made[0].weight.mul_(2)
    first.restore(made)
    first.restore(made)  # any number of times
    assert torch.equal(torch.rand(4), drawn)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert made[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_peer_that_is_not_known_is_refused(batch: Batch) -> None:
    with pytest.raises(UnknownNameError, match="known: plain, no-compiler, checkpoint"):
        trained("magic", 0, batch)


def test_without_a_compiler_the_refusal_says_what_is_missing(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_methods.shutil, "which", lambda _: None)
    with pytest.raises(PlatformError, match=r"needs one of c\+\+, g\+\+, clang\+\+"):
        trained("compile", 0, batch)
