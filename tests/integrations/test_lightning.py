"""Lightning's strategy trains as plain Lightning does, and keeps within its budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thoroughness import at_most
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

L = pytest.importorskip("lightning", reason="the extra `hosts` has it")

from daf.core.errors import BudgetError, HostError
from daf.integrations.lightning import DafStrategy
from daf.memory.owners import owners

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
WIDTH, ROWS = 2048, 1024
STEPS = at_most(20, 8)
ROOM_BYTES = 60_000_000
Budget = Callable[[int], int]
Same = Callable[[nn.Module, nn.Module], None]


class Net(L.LightningModule):
    """Saves 40 KB for each of its examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid())
        self.net = nn.Sequential(nn.Linear(16, WIDTH), *smooth, nn.Linear(WIDTH, 4))

    def training_step(self, batch: Any, index: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("right", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watches(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.batches += 1
        self.losses.append(float(outputs["loss"]))
        self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16 * ROWS, 16, generator=generator)
    return DataLoader(TensorDataset(x, x.argmax(1) % 4), batch_size=ROWS)


def fit(
    module: Any, strategy: Any, *callbacks: Any, resumed: str | None = None, **options: Any
) -> Any:
    defaults = {"max_steps": STEPS, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0, **defaults, **options},
    )
    trainer.fit(module, batches(), batches(), ckpt_path=resumed)
    return trainer


def test_steps_are_the_host_s_own(budget: Budget, same_weights: Same) -> None:
    """Accumulation of 4, clipping, a schedule, counters, logs, validation; batches in parts."""
    plain, seen = Net(), Watches()
    host = fit(plain, "auto", seen)
    ours, watched = Net(), Watches()
    bound = budget(ROOM_BYTES)
    strategy = DafStrategy(bound, tolerance=0)
    trainer = fit(ours, strategy, watched)
    same_weights(ours, plain)
    assert strategy.report is not None
    assert strategy.session is not None
    assert strategy.report.micro_batch < ROWS
    assert strategy.session.peak_bytes <= bound
    assert (
        (trainer.global_step, watched.batches)
        == (STEPS, 4 * STEPS)
        == (host.global_step, seen.batches)
    )
    assert watched.losses == pytest.approx(seen.losses, rel=1e-3)
    for found, expected in zip(watched.logged, seen.logged, strict=True):
        assert {"loss", "right", "daf_peak_bytes"} <= set(found)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert not owners.living()
    assert "log" not in vars(ours)


def test_bfloat16_is_the_host_s_own(budget: Budget) -> None:
    plain, seen = Net(), Watches()
    fit(plain, "auto", seen, precision="bf16-mixed", max_steps=5)
    ours, watched = Net(), Watches()
    strategy = DafStrategy(budget(ROOM_BYTES), tolerance=0)
    fit(ours, strategy, watched, precision="bf16-mixed", max_steps=5)
    assert watched.losses == pytest.approx(seen.losses, rel=1e-2)


def test_a_run_resumed_in_the_middle_ends_as_one_that_was_not(
    tmp_path: Path, budget: Budget, same_weights: Same
) -> None:
    plain = Net()
    fit(plain, "auto", max_steps=8)
    first = fit(Net(), DafStrategy(budget(ROOM_BYTES), tolerance=0), max_steps=4)
    first.strategy.connect(first.lightning_module)
    first.save_checkpoint(tmp_path / "half.ckpt")
    assert first.strategy.session.state_dict()["step_index"] == 16
    ours = Net()
    strategy = DafStrategy(budget(ROOM_BYTES), tolerance=0)
    fit(ours, strategy, max_steps=8, resumed=str(tmp_path / "half.ckpt"))
    same_weights(ours, plain)
    assert strategy.session is not None
    assert strategy.session.state_dict()["step_index"] == 32
    assert strategy.session.proof_ms == 0


def test_a_budget_that_cannot_hold_is_an_out_of_memory_error(budget: Budget) -> None:
    with pytest.raises(BudgetError) as found:
        fit(Net(), DafStrategy(budget(500_000)), max_steps=1)
    assert isinstance(found.value, torch.OutOfMemoryError)
    assert found.value.least_bytes
    assert not owners.living()


def test_the_name_alone_takes_what_the_machine_can_spare() -> None:
    trainer = fit(Net(), "daf", max_steps=1)
    assert trainer.strategy.budget == "auto"
    assert trainer.strategy.report.budget_bytes > 0


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backwards(Net):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Nothing(Net):
    def training_step(self, batch: Any, index: int) -> Any:
        return None


class Extras(Net):
    def training_step(self, batch: Any, index: int) -> Any:
        return {"loss": super().training_step(batch, index), "rows": batch[0]}


class Searches(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Manual, "backward pass is its own"),
        (Backwards, "backward pass is its own"),
        (Nothing, "without one"),
        (Searches, "again within a step"),
    ],
)
def test_what_a_budget_cannot_have_is_refused(kind: type[Net], message: str) -> None:
    plain = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    with pytest.raises(HostError, match=message):
        fit(kind(), DafStrategy(None), max_steps=1, **plain)
    assert not owners.living()


def test_what_stands_beside_the_loss_is_returned_of_whole_batches_only(budget: Budget) -> None:
    seen: list[Any] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs["rows"])

    fit(Extras(), DafStrategy(None), Looks(), max_steps=1)
    assert [each.shape for each in seen] == [(ROWS, 16)] * 4
    with pytest.raises(HostError, match="rows"):
        fit(Extras(), DafStrategy(budget(ROOM_BYTES), tolerance=0), max_steps=1)
