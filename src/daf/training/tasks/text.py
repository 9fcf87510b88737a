"""Tasks on bytes: predicting the next one, and predicting masked ones."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from daf.training.batches import Batch, Indices
from daf.training.data.contents import MASK_SYMBOL, ByteArray, TextData
from daf.training.tasks.task import Loss, Task, scores_of

# Devlin et al., NAACL 2019, section 3.1: of all symbols 15 % are predicted; of
# those, 80 % are replaced by the mask symbol and 10 % by a random one.
_PREDICTED = 0.15
_MASKED = 0.8
_RANDOM = 0.1
_NOT_PREDICTED = -100  # the index that torch's cross_entropy leaves out
_TEST_MASK_SEED = 0x7E57

Symbols = NDArray[np.int64]


class _TextTask(Task):
    """An example is a window of ``context`` bytes; windows do not overlap."""

    def __init__(self, data: TextData) -> None:
        super().__init__()
        self._data = data
        self._context = data.context

    @property
    def train_examples(self) -> int:
        return self._windows(self._data.train)

    @property
    def test_examples(self) -> int:
        return self._windows(self._data.test)

    def _windows(self, text: ByteArray) -> int:
        return (len(text) - 1) // self._context

    def _gathered(self, text: ByteArray, indices: Indices, length: int) -> Symbols:
        places = indices[:, None] * self._context + np.arange(length)
        symbols: Symbols = text[places].astype(np.int64)
        return symbols


class CausalLanguage(_TextTask):
    """Predict every byte from those before it; judged by perplexity per byte."""

    metric_name = "test_perplexity"

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Bytes and the bytes that follow them, int64 [N, context]; nothing is random."""
        del generator
        return self._shifted(self._data.train, indices)

    def test_batch(self, indices: Indices) -> Batch:
        """Test bytes and the bytes that follow them."""
        return self._shifted(self._data.test, indices)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Mean cross-entropy per byte, in nats."""
        scores, targets = _flat_scores(model, batch)
        self.tally.add(scores, targets)
        return F.cross_entropy(scores, targets)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """(sum of cross-entropies in nats, bytes)."""
        scores, targets = _flat_scores(model, batch)
        return float(F.cross_entropy(scores, targets, reduction="sum")), float(len(targets))

    def metric(self, mean: float) -> float:
        """Perplexity: e to the mean cross-entropy."""
        return math.exp(mean)

    def _shifted(self, text: ByteArray, indices: Indices) -> Batch:
        symbols = torch.from_numpy(self._gathered(text, indices, self._context + 1))
        return symbols[:, :-1].contiguous(), symbols[:, 1:].contiguous()


class MaskedLanguage(_TextTask):
    """Predict masked bytes from those around them; judged by their mean loss."""

    metric_name = "test_masked_loss"

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Masked bytes and targets (-100 where nothing is asked), int64 [N, context]."""
        return _masked(self._gathered(self._data.train, indices, self._context), generator)

    def test_batch(self, indices: Indices) -> Batch:
        """Masked test bytes; a window's mask is the same in whatever batch it comes."""
        windows = self._gathered(self._data.test, indices, self._context)
        pairs = [
            _masked(window[None], np.random.default_rng([_TEST_MASK_SEED, int(i)]))
            for i, window in zip(indices, windows, strict=True)
        ]
        inputs, targets = zip(*pairs, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """(sum of cross-entropies in nats, how many bytes were asked for)."""
        scores, targets = _flat_scores(model, batch)
        asked = targets != _NOT_PREDICTED
        self.tally.add(scores, targets, asked)
        return F.cross_entropy(scores, targets, reduction="sum"), asked.sum()

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """(sum of cross-entropies in nats, how many bytes were asked for)."""
        scores, targets = _flat_scores(model, batch)
        total = float(F.cross_entropy(scores, targets, reduction="sum"))
        return total, float((targets != _NOT_PREDICTED).sum())


def _flat_scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    symbols, targets = batch
    return scores_of(model(symbols)).flatten(0, 1), targets.flatten()


def _masked(symbols: Symbols, generator: np.random.Generator) -> Batch:
    predicted = generator.random(symbols.shape) < _PREDICTED
    predicted[:, 0] |= ~predicted.any(1)  # a window without a question has no loss
    fate = generator.random(symbols.shape)
    substitutes = generator.integers(0, MASK_SYMBOL, symbols.shape)
    changed = np.where(fate < _MASKED, MASK_SYMBOL, symbols)
    changed = np.where((fate >= _MASKED) & (fate < _MASKED + _RANDOM), substitutes, changed)
    inputs = np.where(predicted, changed, symbols)
    targets = np.where(predicted, symbols, _NOT_PREDICTED)
    return torch.from_numpy(inputs), torch.from_numpy(targets)
