"""A task: what a model and data together are trained and tested on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.batches import Batch, Indices

Loss = Tensor | tuple[Tensor, Tensor]


MOST_CLASSES = 1000


class Tally:
    """Counts right answers while the loss is computed, for the live display."""

    def __init__(self) -> None:
        self.right = 0
        self.answered = 0

    def add(self, scores: Tensor, targets: Tensor, asked: Tensor | None = None) -> None:
        """Count the rows of ``scores`` [N, classes] that are highest at ``targets`` [N].

        ``asked`` [N] says which rows count. Of very many classes nothing is counted: whoever looks
        at such scores makes them exist, where the loss alone can do without
        (``linear_cross_entropy``).
        """
        if scores.shape[1] > MOST_CLASSES:
            return
        right = scores.detach().argmax(1) == targets
        self.right += int((right if asked is None else right & asked).sum())
        self.answered += len(targets) if asked is None else int(asked.sum())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted inside."""
        right, answered = self.right, self.answered
        try:
            yield
        finally:
            self.right, self.answered = right, answered

    def take_percent(self) -> float | None:
        """The share of right answers since the last call, in percent; None if none were given."""
        percent = 100.0 * self.right / self.answered if self.answered else None
        self.right = self.answered = 0
        return percent


class Task(ABC):
    """Makes batches and judges a model's outputs on them."""

    metric_name: str

    def __init__(self) -> None:
        self.tally = Tally()

    @property
    @abstractmethod
    def train_examples(self) -> int:
        """How many examples there are to train on."""

    @property
    @abstractmethod
    def test_examples(self) -> int:
        """How many examples there are to test on."""

    @abstractmethod
    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """The batch of these training examples; ``generator`` decides what is random in it."""

    @abstractmethod
    def test_batch(self, indices: Indices) -> Batch:
        """The batch of these test examples, the same at every call."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The mean loss (scalar), or (sum, weight), with its graph."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """What the metric sums over test batches: (sum, weight)."""

    def metric(self, mean: float) -> float:
        """The metric, from the mean of all scores."""
        return mean


def scores_of(output: Tensor | object) -> Tensor:
    """The scores in a model's output: a tensor, or something with ``logits`` (transformers).

    Raises:
        DataError: it is neither.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise DataError(
            f"expected the model to return a tensor or an object with 'logits', "
            f"found {type(output).__name__}"
        )
    return found
