"""A loop with Lightning's Fabric, on one device."""

from __future__ import annotations

import torch
from lightning import Fabric

import daf
from daf_bench.hosts.setting import ACCUMULATED, LEARNING_RATE, MOST_NORM, Given


def plain(given: Given) -> None:
    """Fabric alone."""
    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.AdamW(given.model.parameters(), LEARNING_RATE)
    model, optimizer = fabric.setup(given.model, optimizer)
    for index, batch in enumerate(fabric.setup_dataloaders(given.loader()), 1):
        fabric.backward(model(**batch).loss / ACCUMULATED)
        if index % ACCUMULATED == 0:
            fabric.clip_gradients(model, optimizer, max_norm=MOST_NORM)
            optimizer.step()
            optimizer.zero_grad()


def budgeted(given: Given) -> None:
    """The same within a budget."""
    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.AdamW(given.model.parameters(), LEARNING_RATE)
    model, optimizer = fabric.setup(given.model, optimizer)
    with daf.Session(model.module, optimizer.optimizer, given.budget, **given.options) as session:
        for index, batch in enumerate(fabric.setup_dataloaders(given.loader()), 1):
            session.backward(batch, lambda model, batch: model(**batch).loss / ACCUMULATED)
            if index % ACCUMULATED == 0:
                fabric.clip_gradients(model, optimizer, max_norm=MOST_NORM)
                optimizer.step()
                optimizer.zero_grad()
