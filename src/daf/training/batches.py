"""Which examples a step trains on, and how stored bytes become tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daf.core.errors import DataError
from daf.training.data.contents import ByteArray, ImageData

Indices = NDArray[np.int64]
Batch = tuple[Tensor, ...]

_CROP_PADDING = 4  # pixels, customary for CIFAR (Lee et al., AISTATS 2015)


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


def crop_and_flip(images: ByteArray, generator: np.random.Generator) -> ByteArray:
    """Shift every image by up to four pixels, padded with zeros, and mirror half of them."""
    count, size = images.shape[:2]
    around = (_CROP_PADDING, _CROP_PADDING)
    padded = np.pad(images, ((0, 0), around, around, (0, 0)))
    tops, lefts = generator.integers(0, 2 * _CROP_PADDING + 1, (2, count, 1))
    mirrored = generator.random((count, 1)) < 0.5
    along = np.arange(size)
    rows = tops + along
    columns = lefts + np.where(mirrored, along[::-1], along)
    moved: ByteArray = padded[
        np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]
    ]
    return moved


def to_tensor(
    data: ImageData, images: ByteArray, channels: int, memory_format: torch.memory_format
) -> Tensor:
    """Return stored images as float32 [N, channels, size, size], enlarged and normalised."""
    big = images.repeat(data.repeat, 1).repeat(data.repeat, 2) if data.repeat > 1 else images
    if channels != data.channels:
        big = big.repeat(channels, 3)
    pixels = torch.from_numpy(np.ascontiguousarray(big)).permute(0, 3, 1, 2)
    values = pixels.to(torch.float32, memory_format=memory_format)
    mean = torch.tensor(data.normalisation.mean).view(1, -1, 1, 1)
    deviation = torch.tensor(data.normalisation.deviation).view(1, -1, 1, 1)
    return values.div_(data.full_scale).sub_(mean).div_(deviation)


def checked_channels(data: ImageData, wanted: int) -> int:
    """Return ``wanted`` if the images can have so many input channels.

    Raises:
        DataError: ``wanted`` is not the images' channel count, nor are they grey.
    """
    if wanted == data.channels or data.channels == 1:
        return wanted
    raise DataError(
        f"the model reads {wanted} channels, but {data.name!r} has {data.channels}; "
        f"choose a model that reads {data.channels}, or grey images"
    )
