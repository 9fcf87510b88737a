"""Which examples a step trains on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from daf.core.errors import DataError

Indices = NDArray[np.int64]
Batch = tuple[Tensor, ...]


class BatchOrder:
    """A seeded permutation of each epoch's examples, indexed by step, without partial batches.

    Raises:
        DataError: a batch is empty, or larger than the data.
    """

    def __init__(self, examples: int, batch_size: int, seed: int) -> None:
        if not 0 < batch_size <= examples:
            raise DataError(
                f"asked for batches of {batch_size}, but there are {examples} training examples; "
                f"try --batch-size {max(1, min(batch_size, examples))}"
            )
        self.batch_size = batch_size
        self.steps_per_epoch = examples // batch_size
        self.left_out_per_epoch = examples % batch_size
        self._examples = examples
        self._seed = seed
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
