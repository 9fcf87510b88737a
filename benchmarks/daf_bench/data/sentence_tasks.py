"""Sentences in memory, and the tasks on them: classification, scoring and continuation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.task import Batch, Goal, Indices, Loss, Task, scores_of
from daf_bench.data.tokens import TokenRows

NO_CLASSES = 0  # the target is a score: one number

_NOT_ASKED = -100  # the index that torch's cross_entropy ignores


@dataclass(frozen=True, slots=True)
class SentenceData:
    """Sentences or pairs with a class or a score; or, if ``generates``, texts to continue."""

    name: str
    train: TokenRows
    test: TokenRows
    classes: int
    vocabulary: int
    context: int
    generates: bool = False

    def __post_init__(self) -> None:
        """Raise DataError if prompts leave no token to predict."""
        for part in (self.train, self.test) if self.generates else ():
            if not (part.lengths > part.prompts).any():
                raise DataError(
                    f"asked for {self.name} with a context of {self.context}; its prompts take all "
                    f"of that, or more: try --context {2 * self.context}"
                )

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What models can be trained to do on these sentences."""
        return (Goal.CAUSAL if self.generates else Goal.JUDGE,)

    @property
    def facts(self) -> dict[str, int]:
        """What a model factory may ask for; a score counts as one class."""
        facts = {"vocabulary": self.vocabulary, "context": self.context}
        return facts if self.generates else facts | {"classes": max(1, self.classes)}

    def make_task(self, goal: Goal, model: nn.Module, **images: object) -> Task:
        """Return the only task for these data."""
        del goal, model, images
        if self.generates:
            return Continuation(self)
        return SentenceClasses(self) if self.classes else SentenceScores(self)


class _SentenceTask(Task):
    """A batch is tokens and their attention mask, int64 [N, context], and targets."""

    def __init__(self, data: SentenceData) -> None:
        super().__init__(len(data.train), len(data.test))
        self._data = data

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        del generator
        return self._batch(self._data.train, indices)

    def test_batch(self, indices: Indices) -> Batch:
        return self._batch(self._data.test, indices)

    def _batch(self, part: TokenRows, indices: Indices) -> Batch:
        tokens = torch.from_numpy(part.tokens[indices].astype(np.int64))
        places = torch.arange(tokens.shape[1])
        counts = places < torch.from_numpy(part.lengths[indices])[:, None]
        return tokens, counts.long(), self._targets(part, indices, tokens)

    def _targets(self, part: TokenRows, indices: Indices, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def scores(model: nn.Module, batch: Batch) -> Tensor:
        """Return the scores of ``model(tokens, attention_mask=...)``."""
        tokens, counts, _ = batch
        return scores_of(model(tokens, attention_mask=counts))


class SentenceClasses(_SentenceTask):
    """Cross-entropy over classes; the metric is test accuracy in percent."""

    metric_name = "test_accuracy_percent"

    def _targets(self, part: TokenRows, indices: Indices, tokens: Tensor) -> Tensor:
        del tokens
        return torch.from_numpy(part.targets[indices].astype(np.int64))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross-entropy in nats."""
        scores, labels = self.scores(model, batch), batch[2]
        self.tally.add(scores, labels)
        return F.cross_entropy(scores, labels)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (right answers x 100, sentences)."""
        right = (self.scores(model, batch).argmax(1) == batch[2]).sum()
        return 100.0 * float(right), float(len(batch[2]))


class SentenceScores(_SentenceTask):
    """Squared error of a score; the metric is its mean over test pairs."""

    metric_name = "test_mean_squared_error"

    def _targets(self, part: TokenRows, indices: Indices, tokens: Tensor) -> Tensor:
        del tokens
        return torch.from_numpy(part.targets[indices])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean squared error."""
        return F.mse_loss(self.scores(model, batch).flatten(), batch[2])

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (sum of squared errors, pairs)."""
        wrong = self.scores(model, batch).flatten() - batch[2]
        return float(wrong.square().sum()), float(len(wrong))


class Continuation(_SentenceTask):
    """Prediction of every token of a text from its prompt and the tokens before it."""

    metric_name = "test_perplexity"

    def _targets(self, part: TokenRows, indices: Indices, tokens: Tensor) -> Tensor:
        """Return the next tokens, int64 [N, context]; -100 in the prompt and behind the end."""
        following = F.pad(tokens[:, 1:], (0, 1), value=_NOT_ASKED)
        places = torch.arange(1, tokens.shape[1] + 1)
        prompts, lengths = (
            torch.from_numpy(each[indices])[:, None] for each in (part.prompts, part.lengths)
        )
        return following.masked_fill((places < prompts) | (places >= lengths), _NOT_ASKED)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return (sum of cross-entropies in nats, predicted tokens)."""
        scores, targets = self.scores(model, batch).flatten(0, 1), batch[2].flatten()
        asked = targets != _NOT_ASKED
        self.tally.add(scores, targets, asked)
        return F.cross_entropy(scores, targets, reduction="sum"), asked.sum().clamp(min=1)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (sum of cross-entropies in nats, predicted tokens)."""
        scores, targets = self.scores(model, batch).flatten(0, 1), batch[2].flatten()
        total = float(F.cross_entropy(scores, targets, reduction="sum"))
        return total, float((targets != _NOT_ASKED).sum())

    def metric(self, mean: float) -> float:
        """Return the perplexity: e to the mean cross-entropy."""
        return math.exp(mean)
