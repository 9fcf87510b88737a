"""Denoising of images, a task for U-Nets: importing it adds it to those of image data."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.training.data.images import ImageData, ImageTask
from daf.training.task import Batch, Goal, Indices, Loss, scores_of

_NOISE_DEVIATION = 0.5  # relative to the clean images' deviation
_TEST_NOISE_SEED = 0x7E57


class Denoising(ImageTask):
    """A denoising autoencoder (Vincent et al., ICML 2008): noisy image in, clean image out."""

    metric_name = "test_mean_squared_error"

    def train_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Return noisy and clean images, float32 [N, channels, size, size]."""
        return self._with_noise(self.augmented(indices, generator), generator)

    def test_batch(self, indices: Indices) -> Batch:
        """Return noisy and clean test images; an image's noise does not depend on its batch."""
        noisy = [
            self._with_noise(
                self.tensor(self.data.test.images[i : i + 1]),
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
        return torch.cat(images).contiguous(memory_format=self.memory_format)


ImageData.tasks[Goal.DENOISE] = Denoising
