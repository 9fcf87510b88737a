"""Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn

from daf.integrations.lightning import DafStrategy
from daf_bench.hosts.setting import ACCUMULATED, LEARNING_RATE, MOST_NORM, Given

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(LightningModule):
    """The decoder as a Lightning module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the batch's loss."""
        del index
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that every host has."""
        return torch.optim.AdamW(self.parameters(), LEARNING_RATE)


def options(given: Given) -> dict[str, Any]:
    """Return what the trainer of both scripts is told."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": given.updates,
        "accumulate_grad_batches": ACCUMULATED,
        "gradient_clip_val": MOST_NORM,
        "default_root_dir": given.output,
        **QUIET,
    }


def plain(given: Given) -> None:
    """Lightning alone."""
    trainer = Trainer(**options(given))
    trainer.fit(Module(given.model), given.loader())


def budgeted(given: Given) -> None:
    """The same within a budget."""
    trainer = Trainer(**options(given), strategy=DafStrategy(given.budget, **given.options))
    trainer.fit(Module(given.model), given.loader())
