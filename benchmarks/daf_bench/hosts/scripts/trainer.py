"""Hugging Face's ``Trainer``."""

from __future__ import annotations

from transformers import Trainer, TrainingArguments

from daf.integrations import transformers as daf_transformers
from daf_bench.hosts.scripts.trainer_options import options
from daf_bench.hosts.setting import Given


def plain(given: Given) -> None:
    """The trainer alone."""
    arguments = TrainingArguments(**options(given))
    trainer = Trainer(given.model, arguments, train_dataset=given.rows())
    trainer.train()


def budgeted(given: Given) -> None:
    """The same within a budget."""
    arguments = TrainingArguments(**options(given))
    trainer = Trainer(given.model, arguments, train_dataset=given.rows())
    trainer = daf_transformers.budgeted(trainer, given.budget, **given.options)
    trainer.train()
