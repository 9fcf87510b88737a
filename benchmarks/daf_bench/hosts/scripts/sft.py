"""TRL's ``SFTTrainer``: supervised fine-tuning on texts."""

from __future__ import annotations

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from daf.integrations import transformers as daf_transformers
from daf_bench.hosts.material import make_tokenizer, sentences
from daf_bench.hosts.scripts.trainer_options import options
from daf_bench.hosts.setting import Given


def texts(given: Given) -> Dataset:
    """Return rows of text, each as long as a window with the end that TRL adds."""
    length = given.shape.length - 1
    return Dataset.from_dict({"text": list(sentences(given.texts, length, given.examples))})


def arguments(given: Given) -> SFTConfig:
    """Return the trainer's arguments, without TRL's checkpointing."""
    return SFTConfig(max_length=given.shape.length, gradient_checkpointing=False, **options(given))


def plain(given: Given) -> None:
    """The trainer alone."""
    names = {"train_dataset": texts(given), "processing_class": make_tokenizer(given.texts)}
    trainer = SFTTrainer(given.model, args=arguments(given), **names)
    trainer.train()


def budgeted(given: Given) -> None:
    """The same within a budget."""
    names = {"train_dataset": texts(given), "processing_class": make_tokenizer(given.texts)}
    trainer = SFTTrainer(given.model, args=arguments(given), **names)
    trainer = daf_transformers.budgeted(trainer, given.budget, **given.options)
    trainer.train()
