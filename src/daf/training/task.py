"""What a model is trained on: a data set, and a task that makes its batches and judges outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.core.replaced import replaced

Indices = NDArray[np.int64]
Batch = tuple[Tensor, ...]
Loss = Tensor | tuple[Tensor, Tensor]

MOST_CLASSES = 1000

Factory = TypeVar("Factory", bound=Callable[..., nn.Module])


class Goal(StrEnum):
    """What a model is trained to do."""

    CLASSIFY = "classify"
    DENOISE = "denoise"
    CAUSAL = "causal"  # predict the next byte
    MASKED = "masked"  # predict masked bytes
    JUDGE = "judge"  # a sentence's class or score

    @property
    def reads_images(self) -> bool:
        """True if a model with this goal reads images rather than text."""
        return self in (Goal.CLASSIFY, Goal.DENOISE)


def trained_to(goal: Goal) -> Callable[[Factory], Factory]:
    """Mark a factory with what its models are trained to do, where ``--goal`` is left out."""

    def mark(factory: Factory) -> Factory:
        factory.goal = goal  # type: ignore[attr-defined]
        return factory

    return mark


class BatchOrder:
    """Each epoch's seeded order in whole batches, by step; raises DataError if there is none."""

    def __init__(self, examples: int, batch_size: int, seed: int) -> None:
        if not 0 < batch_size <= examples:
            raise DataError(
                f"asked for batches of {batch_size}, but there are {examples} training examples; "
                f"try --batch-size {max(1, min(batch_size, examples))}"
            )
        self.batch_size = batch_size
        self.steps_per_epoch = examples // batch_size
        self.left_out_per_epoch = examples % batch_size
        self._examples, self._seed = examples, seed
        self._epoch = -1
        self._permutation: Indices = np.empty(0, np.int64)

    def indices(self, step: int) -> Indices:
        """Return the examples of ``step``, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._permutation = generator.permutation(self._examples)
            self._epoch = epoch
        return self._permutation[place * self.batch_size : (place + 1) * self.batch_size]


class Tally:
    """A count of right answers while the loss is computed, for the live display."""

    def __init__(self) -> None:
        self.right, self.answered = 0, 0

    def add(self, scores: Tensor, targets: Tensor, asked: Tensor | None = None) -> None:
        """Count the rows of ``scores`` [N, classes] that are highest at ``targets`` [N].

        ``asked`` [N] masks the rows. Above ``MOST_CLASSES`` nothing is counted: reading the scores
        would materialise them, which a fused loss (``linear_cross_entropy``) avoids.
        """
        if scores.shape[1] > MOST_CLASSES:
            return
        right = scores.detach().argmax(1) == targets
        self.right += int((right if asked is None else right & asked).sum())
        self.answered += len(targets) if asked is None else int(asked.sum())

    def paused(self) -> AbstractContextManager[None]:
        """Count nothing inside."""
        return replaced(self, right=self.right, answered=self.answered)

    def take_percent(self) -> float | None:
        """Return the percentage of right answers since the last call; None if there were none."""
        percent = 100.0 * self.right / self.answered if self.answered else None
        self.right = self.answered = 0
        return percent


class Task(ABC):
    """A maker of batches of so many examples, that also judges a model's outputs on them."""

    metric_name: str

    def __init__(self, train_examples: int, test_examples: int) -> None:
        self.train_examples, self.test_examples = train_examples, test_examples
        self.tally = Tally()

    @abstractmethod
    def train_batch(self, indices: Indices, generator: "np.random.Generator") -> Batch:
        """Return the batch of these training examples, with randomness from ``generator``."""

    @abstractmethod
    def test_batch(self, indices: Indices) -> Batch:
        """Return the batch of these test examples, the same at every call."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean loss (scalar), or (sum, weight), with its graph."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (sum, weight) of a batch's part in the metric."""

    def metric(self, mean: float) -> float:
        """Return the metric from the mean of all scores."""
        return mean


class TalliedLoss:
    """A task's loss; while the session measures, the tally does not count."""

    def __init__(self, task: Task, session: Any) -> None:
        self._task, self._session = task, session

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        is_measuring = self._session is not None and self._session.is_measuring
        with self._task.tally.paused() if is_measuring else nullcontext():
            return self._task.loss(model, batch)

    def __reduce__(self) -> Any:  # what another run's is known by
        return TalliedLoss, (self._task, None)


class DataSet(Protocol):
    """Data in memory, with a test part."""

    @property
    def name(self) -> str:
        """The name by which the data were loaded."""

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What models can be trained to do on these data; the customary goal first."""

    @property
    def facts(self) -> Mapping[str, int]:
        """What a model factory may ask for."""

    def make_task(
        self,
        goal: Goal,
        model: nn.Module,
        *,
        memory_format: torch.memory_format = torch.channels_last,
        augment: bool | None = None,
    ) -> Task:
        """Return the task of ``goal``; raises DataError if the model cannot read these data.

        Only images have a ``memory_format``, and an ``augment`` (crops, flips; None: as usual).
        """


def settle_goal(model_name: str, goal: Goal | None, data: DataSet) -> Goal:
    """Return ``goal`` (None: the customary one); raises DataError if ``data`` do not serve it."""
    served: tuple[Goal, ...] = getattr(data, "goals", ())  # a user's factory may return anything
    if goal is None and served:
        return served[0]
    if goal is None or goal not in served:
        raise DataError(
            f"model {model_name!r} has the goal {goal and goal.value!r}, but "
            f"{getattr(data, 'name', data)!r:.80} serves "
            f"{' or '.join(served) or 'none'}; name other data, or another goal by --goal"
        )
    return goal


def scores_of(output: Tensor | object) -> Tensor:
    """Return a model's output, or its ``logits`` (transformers); raises DataError for others."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise DataError(
            f"expected the model to return a tensor or an object with 'logits', "
            f"found {type(output).__name__}"
        )
    return found
