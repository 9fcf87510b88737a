"""The peers train as plain PyTorch does, each by its own means, and the table tells the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from daf.bench import peers, peers_job
from daf.bench.peers import Setting, blocks_of, make_peer, minmax_policy
from daf.cli import app
from daf.errors import PlatformError, UnknownNameError
from daf.plan import Method, Need
from daf.report.peers_page import COLUMNS, cells, peers_page, verdicts

Batch = tuple[Tensor, Tensor]


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
    setting = Setting(made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9), loss_fn)
    peer = make_peer(name, setting, amount)
    return made, [peer.step(batch) for _ in range(steps)], peer


def test_checkpointing_runs_every_block_twice_and_changes_nothing(batch: Batch) -> None:
    plain, losses, _ = trained("plain", 0, batch)
    theirs, same_losses, _ = trained("checkpoint", 0, batch)
    assert same_losses == losses
    for one, other in zip(plain.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [block.calls for block in blocks_of(plain)] == [3, 3]
    assert [block.calls for block in blocks_of(theirs)] == [6, 6]


def test_blocks_are_what_one_would_checkpoint_by_hand() -> None:
    assert [type(block) for block in blocks_of(model())] == [Block, Block]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    with pytest.raises(PlatformError, match="no sequence of blocks"):
        make_peer("checkpoint", Setting(nn.Linear(2, 2), None, loss_fn), 0)  # type: ignore[arg-type]


def test_accumulation_adds_up_to_the_whole_batch_also_when_pieces_differ(batch: Batch) -> None:
    ragged = batch[0][:1000], batch[1][:1000]
    plain, losses, _ = trained("plain", 0, ragged)
    theirs, near, _ = trained("accumulate", 3, ragged)
    assert near == pytest.approx(losses, rel=1e-5)
    for one, other in zip(plain.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_disk_holds_large_tensors_in_files_while_they_are_wanted(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.tempfile, "mkdtemp", lambda **_: str(tmp_path))
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


def test_a_peer_that_is_not_known_is_refused(batch: Batch) -> None:
    with pytest.raises(UnknownNameError, match="known: plain, checkpoint"):
        trained("magic", 0, batch)


def test_without_a_compiler_the_refusal_says_what_is_missing(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda _: None)
    with pytest.raises(PlatformError, match=r"needs one of c\+\+, g\+\+, clang\+\+"):
        trained("compile", 0, batch)


TINY = """
from torch import nn

def block(width):
    conv = nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())

def tiny(classes):
    layers = nn.Sequential(block(16), block(16))
    first = nn.Conv2d(1, 16, 3, padding=1)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))
    return nn.Sequential(first, layers, *head)
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., peers_job.PeersJob]:
    """A job on a tiny model whose activations outweigh its process's noise."""
    (tmp_path / "tiny_peer.py").write_text(TINY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {"steps": 2, "bits": (2,), "budgets": (0.01,), "seed": 3}
    return lambda **more: peers_job.PeersJob(
        *("tiny", "tiny_peer:tiny", "digits", 128), **settings | more
    )


@pytest.mark.slow
def test_the_whole_table_is_measured_and_refusals_are_told(
    quick: Callable[..., peers_job.PeersJob],
) -> None:
    chosen = {
        "checkpointing": {"peer": "checkpoint"},
        "min-max codes, 2 bits": {"peer": "minmax", "amount": 2},
    }
    result = peers_job.run(quick(peers=chosen))
    rows = {row["contestant"]: row for row in result.rows}
    assert list(rows) == [
        *("plain", "checkpointing", "min-max codes, 2 bits", "DAF, 2 bits"),
        "DAF, budget 1 %",
    ]
    plain, ours, coded = rows["plain"], rows["DAF, 2 bits"], rows["min-max codes, 2 bits"]
    assert plain["peak_ratio"] == 1.0
    assert plain["step_ratio"] == 1.0
    assert plain["saved_bytes_peak"] == ours["saved_bytes_plain"]
    assert ours["saved_bytes_peak"] < coded["saved_bytes_peak"] < plain["saved_bytes_peak"]
    assert rows["checkpointing"]["gradient_error"] < 1e-5
    # What the codes' table foretells: min-max at two bits errs more than rotated ones.
    assert 0.01 < ours["gradient_error"] < coded["gradient_error"]
    assert "asked for a budget of" in rows["DAF, budget 1 %"]["refused"]
    assert result.figures["speed_vs_minmax_baseline"] == pytest.approx(
        coded["step_ratio"] / ours["step_ratio"]
    )
    page = peers_page(result.rows, result.notes)
    assert page.count('class="bar measured"') == 2  # one of DAF's in each of two charts
    assert "DAF, budget 1 % did not run: " in page
    assert all(len(cells(row)) == len(COLUMNS) for row in result.rows)


def row(name: str, peak: float, step: float, *, is_daf: bool = False) -> dict[str, Any]:
    return {"contestant": name, "peak_ratio": peak, "step_ratio": step, "is_daf": is_daf}


def test_words_say_where_a_peer_wins() -> None:
    ours = row("DAF", 0.5, 1.2, is_daf=True)
    lost = {"contestant": "C", "failed": "killed"}
    said = verdicts([row("plain", 1.0, 1.0), row("A", 0.4, 1.1), row("B", 0.9, 2.0), ours, lost])
    assert said == [
        "Fastest: plain, 1.00 × plain's step at 1.00 × its peak.",
        "Smallest: A, 0.40 × plain's peak at 1.10 × its step.",
        "Beside DAF: faster are “plain” and “A”; smaller is “A”; both is “A”.",
        "C did not run: killed",
    ]
    alone = verdicts([row("plain", 1.0, 1.0), row("DAF", 0.5, 1.2, is_daf=True)])
    assert alone[-1] == "Beside DAF: faster is “plain”; smaller is nobody; both is nobody."


def test_figures_compare_at_the_same_budget(quick: Callable[..., peers_job.PeersJob]) -> None:
    job = quick(budgets=(0.5, 0.25))
    rows = [
        *(row("plain", 1.0, 1.0), row("slow", 0.3, 3.0), row("quick", 0.45, 1.5)),
        row("DAF, budget 50 %", 0.48, 1.1, is_daf=True),
    ]
    figures = peers_job.figures_of(rows, job)
    assert figures == {
        "daf_peak_ratio": 0.48,
        "daf_step_ratio": 1.1,
        "best_peer_peak_ratio": 0.45,
        "best_peer_step_ratio": 1.5,
    }
    none_fits = peers_job.figures_of([rows[0], rows[3]], job)
    assert none_fits["best_peer_peak_ratio"] == 1.0


def test_an_unknown_workload_is_refused() -> None:
    ran = CliRunner().invoke(app, ["bench", "peers", "--workload", "W9"])
    assert ran.exit_code == 2
    assert "known: W1" in ran.stderr
