"""What every workload becomes: data that are loaded, then a model that can be trained on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from daf.training.task import BatchOrder, Indices


class Trains(Protocol):
    """The part of a task that training needs."""

    @property
    def train_examples(self) -> int:
        """How many examples there are."""

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Any:
        """The batch of these examples; ``generator`` decides what is random in it."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """The mean loss (scalar), or (sum, weight)."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """A model with everything that a step takes; every random choice follows the seed.

    ``blocks`` are the modules that a user would checkpoint (paths in ``named_modules``).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Trains
    order: BatchOrder
    blocks: tuple[str, ...]
    seed: int

    def batch(self, step: int) -> Any:
        """The batch of step ``step``, counted from 0: the same for every contestant."""
        generator = np.random.default_rng([self.seed, step])
        return self.task.train_batch(self.order.indices(step), generator)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Data in memory and code imported; the model does not exist yet.

    ``block`` names the class of the modules that a user would checkpoint.
    """

    batch_size: int
    block: str
    make_model: Callable[[], nn.Module]
    make_task: Callable[[nn.Module], Trains]
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]

    def build(self, seed: int = 0) -> Trainable:
        """Build the model; torch's random state afterwards is the same for every contestant."""
        torch.manual_seed(seed)
        model = self.make_model()
        parameters = [each for each in model.parameters() if each.requires_grad]
        task = self.make_task(model)
        order = BatchOrder(task.train_examples, self.batch_size, seed)
        blocks = tuple(
            path for path, part in model.named_modules() if type(part).__name__ == self.block
        )
        return Trainable(model, self.make_optimizer(parameters), task, order, blocks, seed)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD as for CIFAR, with a rate at which a first step from random weights stays finite."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW at a rate that is customary for fine-tuning small language models."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)
