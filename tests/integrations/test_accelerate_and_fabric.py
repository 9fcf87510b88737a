"""Loops of Accelerate and Fabric train as by themselves, also when resumed in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="the extra `hosts` has it")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import daf

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
WIDTH, ROWS, UPDATES, ACCUMULATED = 2048, 512, 20, 4
ROOM_BYTES = 40_000_000
Budget = Callable[[int], int]
Same = Callable[[nn.Module, nn.Module], None]


def net() -> nn.Sequential:
    """Saves 40 KB for each of its examples."""
    torch.manual_seed(0)
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid())
    return nn.Sequential(nn.Linear(16, WIDTH), *smooth, nn.Linear(WIDTH, 4))


def loader(first: int, updates: int) -> DataLoader[Any]:
    """The batches of these updates."""
    rows = ROWS * ACCUMULATED
    x = torch.randn(UPDATES * rows, 16, generator=torch.Generator().manual_seed(1))
    x = x[first * rows : (first + updates) * rows]
    return DataLoader(TensorDataset(x, x.argmax(1) % 4), batch_size=ROWS)


class Accelerated:
    """A loop of Accelerate: accumulation, clipping, a schedule; checkpoints by ``save_state``."""

    def __init__(self, precision: str, bound: int | None) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.host = Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATED, mixed_precision=precision
        )
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        self.model, self.optimizer, self.schedule = self.host.prepare(model, optimizer, schedule)
        self.session: Any = None
        if bound is not None:
            plain = self.host.unwrap_model(self.model)
            self.session = daf.Session(plain, self.optimizer.optimizer, bound, tolerance=0)
            self.host.register_for_checkpointing(self.session)
        self.losses: list[float] = []

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        with self.host.autocast():
            return F.cross_entropy(model(batch[0]), batch[1]) / ACCUMULATED

    def train(self, first: int, updates: int) -> None:
        for batch in self.host.prepare(loader(first, updates)):
            with self.host.accumulate(self.model):
                if self.session is None:
                    loss = F.cross_entropy(self.model(batch[0]), batch[1])
                    self.host.backward(loss)
                    self.losses.append(loss.item())
                else:
                    report = self.session.backward(batch, self.loss_of)
                    self.losses.append(ACCUMULATED * report.loss)
                self.host.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.host.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.host.load_state(str(folder))

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


class Fabricated:
    """The same in Fabric, whose checkpoints hold what they are given."""

    def __init__(self, precision: str, bound: int | None) -> None:
        lightning = pytest.importorskip("lightning", reason="the extra `hosts` has it")
        known = {"no": "32-true", "bf16": "bf16-mixed"}[precision]
        self.host = lightning.Fabric(accelerator="cpu", devices=1, precision=known)
        plain = net()
        optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        self.model, self.optimizer = self.host.setup(plain, optimizer)
        self.session: Any = None
        if bound is not None:
            inside, stepped = self.model.module, self.optimizer.optimizer
            self.session = daf.Session(inside, stepped, bound, tolerance=0)
        self.losses: list[float] = []

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        with self.host.autocast():
            return F.cross_entropy(model(batch[0]), batch[1]) / ACCUMULATED

    def train(self, first: int, updates: int) -> None:
        batches = self.host.setup_dataloaders(loader(first, updates))
        for index, batch in enumerate(batches):
            if self.session is None:
                loss = F.cross_entropy(self.model(batch[0]), batch[1])
                self.host.backward(loss / ACCUMULATED)
                self.losses.append(loss.item())
            else:
                report = self.session.backward(batch, self.loss_of)
                self.losses.append(ACCUMULATED * report.loss)
            if (index + 1) % ACCUMULATED == 0:
                self.host.clip_gradients(self.model, self.optimizer, max_norm=0.1)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        if self.session is not None:
            state["daf"] = self.session.state_dict()
        self.host.save(folder / "all.ckpt", state)

    def load(self, folder: Path) -> None:
        state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        rest = self.host.load(folder / "all.ckpt", state)
        if self.session is not None:
            self.session.load_state_dict(rest["daf"])

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5


def acts(session: Any) -> bool:
    """True if it trains otherwise than plainly."""
    return bool(session.plan.micro_batch < ROWS or session.plan.policy.name != "plain")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("host", "precision", "share", "room_bytes"),
    [
        (Accelerated, "no", 0.001, ROOM_BYTES),
        (Fabricated, "no", 0.001, ROOM_BYTES),
        (Accelerated, "bf16", 0.05, 2 * ROOM_BYTES),
        (Fabricated, "bf16", 0.05, 2 * ROOM_BYTES),
    ],
)
def test_twenty_updates_are_the_host_s_own(
    host: Any, precision: str, share: float, room_bytes: int, budget: Budget
) -> None:
    """Accumulation of 4, clipping, a schedule. ``share``: of how far training moves weights.

    In bfloat16 there must be room for what oneDNN keeps of each kernel that it compiles.
    """
    plain = host(precision, None)
    plain.train(0, UPDATES)
    ours = host(precision, bound := budget(room_bytes))
    with ours.session:
        ours.train(0, UPDATES)
    moved = distance(plain.model, net())
    assert distance(ours.model, plain.model) < share * moved
    assert ours.losses == pytest.approx(plain.losses, rel=share)
    assert ours.rate == plain.rate == 1e-3 / 16
    assert ours.session.peak_bytes <= bound
    assert acts(ours.session) or precision == "bf16"


@pytest.mark.parametrize("host", [Accelerated, Fabricated])
def test_a_run_resumed_in_the_middle_ends_as_one_that_was_not(
    host: Any, tmp_path: Path, budget: Budget, same_weights: Same
) -> None:
    """Neither the host's own nor the session's differ; what was proven is known."""
    folders = [tmp_path / "plain", tmp_path / "ours"]
    ended, steps = [], []
    for folder, within in zip(folders, (False, True), strict=True):
        folder.mkdir()
        halves = []
        for first in (0, 3):
            made = host("no", budget(ROOM_BYTES) if within else None)
            if first:
                made.load(folder)
            made.train(first, 3)
            if not first:
                made.save(folder)
            if within:
                made.session.close()
                steps.append(made.session.state_dict()["step_index"])
            halves.append(made)
        ended.append(halves[-1])
    whole = host("no", None)
    whole.train(0, 6)
    same_weights(ended[0].model, whole.model)
    same_weights(ended[1].model, whole.model)
    assert ended[0].rate == ended[1].rate == whole.rate < 1e-3
    assert steps == [3 * ACCUMULATED, 6 * ACCUMULATED]
    assert ended[1].session.proof_ms == 0
    assert acts(ended[1].session)
