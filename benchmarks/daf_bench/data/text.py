"""A text file as bytes, and the tasks on it: causal and masked language modelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.data.images import ByteArray
from daf.training.task import Batch, Goal, Indices, Loss, Task, scores_of
from daf_bench.data.guarded_files import open_data

MASK_SYMBOL = 256
VOCABULARY = 257  # every byte, and the mask symbol
DEFAULT_CONTEXT = 128
_TEST_FRACTION = 0.1

# Devlin et al., NAACL 2019, section 3.1: 15 % of all symbols are predicted; of those, 80 % become
# the mask symbol and 10 % a random one.
_PREDICTED = 0.15
_MASKED = 0.8
_RANDOM = 0.1
_NOT_PREDICTED = -100  # the index that torch's cross_entropy ignores
_TEST_MASK_SEED = 0x7E57

Symbols = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TextData:
    """A text as bytes, split into windows of ``context`` bytes in batches."""

    goals: ClassVar[tuple[Goal, ...]] = (Goal.CAUSAL, Goal.MASKED)

    name: str
    train: ByteArray
    test: ByteArray
    context: int

    @property
    def facts(self) -> Mapping[str, int]:
        """What a model factory may ask for."""
        return {"vocabulary": VOCABULARY, "context": self.context}

    def make_task(self, goal: Goal, model: nn.Module, **images: object) -> Task:
        """Return the task of ``goal``."""
        del model, images
        return MaskedLanguage(self) if goal is Goal.MASKED else CausalLanguage(self)


def load_text(path: Path, context: int = DEFAULT_CONTEXT) -> TextData:
    """Read ``path`` for byte-level language modelling in windows of ``context`` bytes.

    Raises:
        DataError: the file is missing, or its test part is shorter than one window.
    """
    with open_data(path) as file:
        contents = np.fromfile(file, np.uint8)
    tests = int(len(contents) * _TEST_FRACTION)
    if tests < context + 1:
        raise DataError(
            f"{path} has {len(contents)} bytes; its last tenth must hold a window of {context} and "
            f"one byte: give a text of at least {10 * (context + 1)} bytes or a smaller --context"
        )
    return TextData(f"text:{path}", contents[:-tests], contents[-tests:], context)


class _TextTask(Task):
    """The base of tasks on windows of ``context`` bytes, which do not overlap."""

    def __init__(self, data: TextData) -> None:
        train_windows, test_windows = (
            (len(text) - 1) // data.context for text in (data.train, data.test)
        )
        super().__init__(train_windows, test_windows)
        self._data = data
        self._context = data.context

    def _gathered(self, text: ByteArray, indices: Indices, length: int) -> Symbols:
        places = indices[:, None] * self._context + np.arange(length)
        symbols: Symbols = text[places].astype(np.int64)
        return symbols


class CausalLanguage(_TextTask):
    """Prediction of every byte from those before it; the metric is perplexity per byte."""

    metric_name = "test_perplexity"

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Return bytes and the bytes that follow them, int64 [N, context]; nothing is random."""
        del generator
        return self._shifted(self._data.train, indices)

    def test_batch(self, indices: Indices) -> Batch:
        """Return test bytes and the bytes that follow them."""
        return self._shifted(self._data.test, indices)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross-entropy per byte, in nats."""
        scores, targets = _flat_scores(model, batch)
        self.tally.add(scores, targets)
        return F.cross_entropy(scores, targets)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (sum of cross-entropies in nats, bytes)."""
        scores, targets = _flat_scores(model, batch)
        return float(F.cross_entropy(scores, targets, reduction="sum")), float(len(targets))

    def metric(self, mean: float) -> float:
        """Return the perplexity: e to the mean cross-entropy."""
        return math.exp(mean)

    def _shifted(self, text: ByteArray, indices: Indices) -> Batch:
        symbols = torch.from_numpy(self._gathered(text, indices, self._context + 1))
        return symbols[:, :-1].contiguous(), symbols[:, 1:].contiguous()


class MaskedLanguage(_TextTask):
    """Prediction of masked bytes from those around them; the metric is their mean loss."""

    metric_name = "test_masked_loss"

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Return masked bytes and targets (-100: not predicted), int64 [N, context]."""
        return _masked(self._gathered(self._data.train, indices, self._context), generator)

    def test_batch(self, indices: Indices) -> Batch:
        """Return masked test bytes; a window's mask does not depend on its batch."""
        windows = self._gathered(self._data.test, indices, self._context)
        pairs = [
            _masked(window[None], np.random.default_rng([_TEST_MASK_SEED, int(i)]))
            for i, window in zip(indices, windows, strict=True)
        ]
        inputs, targets = zip(*pairs, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return (sum of cross-entropies in nats, predicted bytes)."""
        scores, targets = _flat_scores(model, batch)
        asked = targets != _NOT_PREDICTED
        self.tally.add(scores, targets, asked)
        return F.cross_entropy(scores, targets, reduction="sum"), asked.sum()

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (sum of cross-entropies in nats, predicted bytes)."""
        scores, targets = _flat_scores(model, batch)
        total = float(F.cross_entropy(scores, targets, reduction="sum"))
        return total, float((targets != _NOT_PREDICTED).sum())


def _flat_scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    symbols, targets = batch
    return scores_of(model(symbols)).flatten(0, 1), targets.flatten()


def _masked(symbols: Symbols, generator: np.random.Generator) -> Batch:
    predicted = generator.random(symbols.shape) < _PREDICTED
    predicted[:, 0] |= ~predicted.any(1)  # a window without a predicted byte has no loss
    fate = generator.random(symbols.shape)
    substitutes = generator.integers(0, MASK_SYMBOL, symbols.shape)
    changed = np.where(fate < _MASKED, MASK_SYMBOL, symbols)
    changed = np.where((fate >= _MASKED) & (fate < _MASKED + _RANDOM), substitutes, changed)
    inputs = np.where(predicted, changed, symbols)
    targets = np.where(predicted, symbols, _NOT_PREDICTED)
    return torch.from_numpy(inputs), torch.from_numpy(targets)
