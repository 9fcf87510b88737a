"""Workloads on texts: an encoder that names a sentence's sentiment, and a decoder with LoRA."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.task import Indices
from daf_bench.workloads import tokens
from daf_bench.workloads.lora import adapt_attention
from daf_bench.workloads.sources import Sources
from daf_bench.workloads.trainable import Loaded, Trains, adam


class EncoderShape(NamedTuple):
    """BERT-small at full size (Turc et al., arXiv 1908.08962, table 1)."""

    length: int = 128
    batch_size: int = 64
    layers: int = 4
    width: int = 512
    heads: int = 8


class DecoderShape(NamedTuple):
    """GPT-2's shape at a size that two cores can train."""

    length: int = 512
    batch_size: int = 8
    layers: int = 6
    width: int = 384
    heads: int = 6


_SMALL_ENCODER = EncoderShape(length=64, batch_size=16, layers=2, width=128, heads=4)
_SMALL_DECODER = DecoderShape(length=16, batch_size=4, layers=2, width=32, heads=2)


class Sentiment:
    """Cross-entropy over two classes of sentence."""

    def __init__(self, sentences: tokens.Sentences) -> None:
        self._sentences = sentences

    @property
    def train_examples(self) -> int:
        """Sentences."""
        return len(self._sentences.labels)

    def train_batch(
        self, indices: Indices, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Words int64 [N, length], where there are any int64 [N, length], labels int64 [N]."""
        del generator
        words = torch.from_numpy(self._sentences.words[indices].astype(np.int64))
        there = (words != tokens.PADDING).long()
        return words, there, torch.from_numpy(self._sentences.labels[indices])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy (nats)."""
        words, there, labels = batch
        return F.cross_entropy(model(input_ids=words, attention_mask=there).logits, labels)


class NextToken:
    """Cross-entropy of every token after those before it."""

    def __init__(self, text: NDArray[np.int32], length: int) -> None:
        self._text, self._length = text, length

    @property
    def train_examples(self) -> int:
        """Windows that do not overlap."""
        return (len(self._text) - 1) // self._length

    def train_batch(
        self, indices: Indices, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Tokens and those that follow them, int64 [N, length]."""
        del generator
        places = indices[:, None] * self._length + np.arange(self._length + 1)
        windows = torch.from_numpy(self._text[places].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy a token (nats)."""
        words, following = batch
        scores: Tensor = model(words).logits
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def load_encoder(sources: Sources, is_small: bool) -> Loaded:
    """BERT-small over the sentences' words."""
    transformers = _transformers()
    shape = _SMALL_ENCODER if is_small else EncoderShape()
    sentences = tokens.load_sentences(sources, shape.length)
    config = transformers.BertConfig(
        vocab_size=sentences.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=shape.length,
        num_labels=2,
    )

    build = transformers.BertForSequenceClassification  # named here: the code is imported now

    def make_model() -> nn.Module:
        model: nn.Module = build(config)
        return model.train()

    def task_of(model: nn.Module) -> Trains:
        del model
        return Sentiment(sentences)

    return Loaded(shape.batch_size, "BertLayer", make_model, task_of, adam)


def load_decoder(sources: Sources, is_small: bool) -> Loaded:
    """A GPT-2 of which only LoRA's parameters are trained; weights are random, as costs no less."""
    transformers = _transformers()
    shape = _SMALL_DECODER if is_small else DecoderShape()
    text = tokens.load_tokens(sources)
    vocabulary = tokens.BYTE_PAIR_VOCABULARY
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=shape.length,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )

    build = transformers.GPT2LMHeadModel  # named here: the code is imported now

    def make_model() -> nn.Module:
        return adapt_attention(build(config), shape.width).train()

    def task_of(model: nn.Module) -> Trains:
        del model
        return NextToken(text, shape.length)

    return Loaded(shape.batch_size, "GPT2Block", make_model, task_of, adam)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise DataError(
            "asked for a workload on text, which needs transformers; "
            "try: pip install 'daf-train[transformers]', or --only w1,w2a,w2b,w2c,w5"
        ) from error
    return transformers
