"""A loop with Accelerate, on one device."""

from __future__ import annotations

import torch
from accelerate import Accelerator

import daf
from daf_bench.hosts.setting import ACCUMULATED, LEARNING_RATE, MOST_NORM, Given


def plain(given: Given) -> None:
    """Accelerate alone."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    optimizer = torch.optim.AdamW(given.model.parameters(), LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(given.model, optimizer, given.loader())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), MOST_NORM)
            optimizer.step()
            optimizer.zero_grad()


def budgeted(given: Given) -> None:
    """The same within a budget."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    optimizer = torch.optim.AdamW(given.model.parameters(), LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(given.model, optimizer, given.loader())
    with daf.Session(model, optimizer.optimizer, given.budget, **given.options) as session:
        for batch in loader:
            with accelerator.accumulate(model):
                session.backward(batch, lambda model, batch: model(**batch).loss / ACCUMULATED)
                accelerator.clip_grad_norm_(model.parameters(), MOST_NORM)
                optimizer.step()
                optimizer.zero_grad()
