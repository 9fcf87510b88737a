"""A training step's batch and loss function, with the batch's size computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daf.step.microbatch import LossFunction, batch_bytes, batch_size, batch_slice


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """``examples``: the batch's first dimension; ``nbytes``: bytes of all its tensors."""

    examples: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step's inputs; ``seed`` in [0, 2**64) and ``index``, from 0, seed the codes."""

    batch: Any
    loss_fn: LossFunction
    info: BatchInfo
    seed: int = 0
    index: int = 0

    @staticmethod
    def of(batch: Any, loss_fn: LossFunction, seed: int = 0, index: int = 0) -> StepContext:
        """Return the context of a step.

        Raises:
            DataError: the batch has no tensor with a first dimension.
        """
        info = BatchInfo(batch_size(batch), batch_bytes(batch))
        return StepContext(batch, loss_fn, info, seed, index)

    def first(self, examples: int) -> Any:
        """Return the batch's first examples, in its own structure; tensors are views."""
        return batch_slice(self.batch, 0, examples)
