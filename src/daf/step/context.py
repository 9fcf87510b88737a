"""A training step's batch and loss function, and how the batch is cut."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from daf.core.errors import DataError
from daf.step.microbatch import LossFunction, batch_bytes
from daf.step.splitting import SplitChoice, Splitting, kind_of
from daf.torch_compat.pytree import tensors_in_batch


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """``examples``: 1 for a batch that cannot be cut; ``nbytes``: bytes of all its tensors."""

    examples: int
    nbytes: int


@dataclass(slots=True)
class StepContext:
    """One step's inputs; ``seed`` in [0, 2**64) and ``index``, from 0, seed the codes."""

    batch: Any
    loss_fn: LossFunction
    info: BatchInfo
    choice: SplitChoice
    splitting: Splitting
    kind: Hashable
    seed: int = 0
    index: int = 0

    @staticmethod
    def of(
        model: nn.Module,
        batch: Any,
        loss_fn: LossFunction,
        splitting: Splitting | None = None,
        seed: int = 0,
        index: int = 0,
    ) -> "StepContext":
        """Return the context of a step; DataError as ``possible_cuts``, or if empty."""
        splitting = splitting or Splitting()
        kind = kind_of(model, batch, loss_fn)
        choice = splitting.choice(kind, batch)
        info = BatchInfo(choice.cut.size(batch), batch_bytes(batch))
        if not info.nbytes and tensors_in_batch(batch):
            raise DataError(
                f"asked to train on a {type(batch).__name__} whose tensors are all empty; give a "
                "batch of one example or more"
            )
        return StepContext(batch, loss_fn, info, choice, splitting, kind, seed, index)

    def choose(self, choice: SplitChoice, *, is_final: bool = True) -> None:
        """Cut this batch in another way; ``is_final``: and all of its kind."""
        self.choice = choice
        self.info = BatchInfo(choice.cut.size(self.batch), self.info.nbytes)
        if is_final:
            self.splitting.remember(self.kind, choice)

    def first(self, examples: int) -> Any:
        """Return the batch's first examples, in its own structure; tensors are views."""
        if examples >= self.info.examples:
            return self.batch
        return self.choice.cut.take(self.batch, 0, examples)

    def parts(self, micro_batch: int) -> list[Any]:
        """Return the batch's micro-batches; all of it where that is not proven."""
        if self.choice.refusal or micro_batch >= self.info.examples:
            return [self.batch]
        return self.choice.cut.parts(self.batch, micro_batch)
