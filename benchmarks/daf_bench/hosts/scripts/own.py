"""A loop of one's own."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_

import daf
from daf_bench.hosts.setting import ACCUMULATED, LEARNING_RATE, MOST_NORM, Given


def plain(given: Given) -> None:
    """PyTorch alone."""
    model = given.model
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for index, batch in enumerate(given.loader(), 1):
        (model(**batch).loss / ACCUMULATED).backward()
        if index % ACCUMULATED == 0:
            clip_grad_norm_(model.parameters(), MOST_NORM)
            optimizer.step()
            optimizer.zero_grad()


def budgeted(given: Given) -> None:
    """The same within a budget."""
    model = given.model
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    with daf.Session(model, optimizer, given.budget, **given.options) as session:
        for index, batch in enumerate(given.loader(), 1):
            session.backward(batch, lambda model, batch: model(**batch).loss / ACCUMULATED)
            if index % ACCUMULATED == 0:
                clip_grad_norm_(model.parameters(), MOST_NORM)
                optimizer.step()
                optimizer.zero_grad()
