"""Tasks on images: classification and denoising."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.training.batches import Batch, Indices, checked_channels, crop_and_flip, to_tensor
from daf.training.data.contents import ByteArray, ImageData, LabelledImages
from daf.training.tasks.task import Loss, Task, scores_of

_NOISE_DEVIATION = 0.5  # relative to the clean images' deviation
_TEST_NOISE_SEED = 0x7E57


class _ImageTask(Task):
    def __init__(
        self,
        data: ImageData,
        channels: int,
        memory_format: torch.memory_format,
        *,
        augment: bool,
    ) -> None:
        super().__init__()
        self._data = data
        self._channels = checked_channels(data, channels)
        self._memory_format = memory_format
        self._augment = augment

    @property
    def train_examples(self) -> int:
        return len(self._data.train)

    @property
    def test_examples(self) -> int:
        return len(self._data.test)

    def _augmented(self, indices: Indices, generator: np.random.Generator) -> Tensor:
        images = self._data.train.images[indices]
        return self._tensor(crop_and_flip(images, generator) if self._augment else images)

    def _tensor(self, images: ByteArray) -> Tensor:
        return to_tensor(self._data, images, self._channels, self._memory_format)


class Classification(_ImageTask):
    """Cross-entropy over classes; the metric is test accuracy in percent."""

    metric_name = "test_accuracy_percent"

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Return images float32 [N, channels, size, size] and labels int64 [N]."""
        return self._augmented(indices, generator), _labels(self._data.train, indices)

    def test_batch(self, indices: Indices) -> Batch:
        """Return test images and labels, never augmented."""
        return self._tensor(self._data.test.images[indices]), _labels(self._data.test, indices)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross-entropy in nats."""
        images, labels = batch
        scores = scores_of(model(images))
        self.tally.add(scores, labels)
        return F.cross_entropy(scores, labels)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (right answers x 100, images)."""
        images, labels = batch
        right = (scores_of(model(images)).argmax(1) == labels).sum()
        return 100.0 * float(right), float(len(labels))


def _labels(part: LabelledImages, indices: Indices) -> Tensor:
    return torch.from_numpy(part.labels[indices])


class Denoising(_ImageTask):
    """A denoising autoencoder (Vincent et al., ICML 2008): noisy image in, clean image out."""

    metric_name = "test_mean_squared_error"

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Return noisy and clean images, float32 [N, channels, size, size]."""
        return self._with_noise(self._augmented(indices, generator), generator)

    def test_batch(self, indices: Indices) -> Batch:
        """Return noisy and clean test images; an image's noise does not depend on its batch."""
        noisy = [
            self._with_noise(
                self._tensor(self._data.test.images[i : i + 1]),
                np.random.default_rng([_TEST_NOISE_SEED, int(i)]),
            )
            for i in indices
        ]
        inputs, clean = zip(*noisy, strict=True)
        return self._stacked(inputs), self._stacked(clean)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean squared error per pixel of the normalised images."""
        noisy, clean = batch
        return F.mse_loss(scores_of(model(noisy)), clean)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return (sum of squared errors, pixels)."""
        noisy, clean = batch
        return float(F.mse_loss(scores_of(model(noisy)), clean, reduction="sum")), clean.numel()

    def _with_noise(self, clean: Tensor, generator: np.random.Generator) -> Batch:
        noise = torch.from_numpy(generator.standard_normal(clean.shape, np.float32))
        return torch.add(clean, noise, alpha=_NOISE_DEVIATION), clean

    def _stacked(self, images: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(images).contiguous(memory_format=self._memory_format)
