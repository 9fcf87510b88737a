"""TRL's ``DPOTrainer``: preferences between two completions."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

from datasets import Dataset
from torch import nn
from trl import DPOConfig, DPOTrainer
from trl.trainer import utils

from daf.integrations import transformers as daf_transformers
from daf_bench.hosts.material import make_tokenizer
from daf_bench.hosts.scripts.trainer_options import options
from daf_bench.hosts.setting import Given


def pairs(given: Given) -> Dataset:
    """Return prompts of a quarter of a window, and two completions of which one is preferred."""
    length, texts = given.shape.length - 1, given.texts
    windows = [texts.sentence(index, length).split() for index in range(given.examples // 2 + 1)]
    prompt = length // 4
    rows = [
        {
            "prompt": " ".join(one[:prompt]),
            "chosen": " " + " ".join(one[prompt:]),
            "rejected": " " + " ".join(other[prompt:]),
        }
        for one, other in pairwise(windows)
    ]
    return Dataset.from_list(rows)


def arguments(given: Given) -> DPOConfig:
    """Return the trainer's arguments: half as many pairs as other hosts have windows."""
    fit_buffer(given.shape.vocabulary)
    halved = replace(given, batch_size=given.batch_size // 2)
    return DPOConfig(max_length=given.shape.length, gradient_checkpointing=False, **options(halved))


def fit_buffer(vocabulary: int) -> None:
    """Let TRL's buffer of logits be as wide as the vocabulary, as it is for larger ones.

    TRL 1.16 allocates 32,768 columns whatever the vocabulary, and writes to those that it needs:
    bytes that were asked for and never become resident.
    """
    name = "_CHUNKED_LOGPROB_CHUNK_SIZE"
    if hasattr(utils, name):
        setattr(utils, name, min(vocabulary, getattr(utils, name)))


def reference(given: Given) -> nn.Module:
    """Return the model that stays as it is."""
    return copy.deepcopy(given.model)


def plain(given: Given) -> None:
    """The trainer alone."""
    names = {"train_dataset": pairs(given), "processing_class": make_tokenizer(given.texts)}
    trainer = DPOTrainer(given.model, reference(given), arguments(given), **names)
    trainer.train()


def budgeted(given: Given) -> None:
    """The same within a budget."""
    names = {"train_dataset": pairs(given), "processing_class": make_tokenizer(given.texts)}
    trainer = DPOTrainer(given.model, reference(given), arguments(given), **names)
    trainer = daf_transformers.budgeted(trainer, given.budget, **given.options)
    trainer.train()
