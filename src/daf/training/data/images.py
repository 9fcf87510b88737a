"""Images in memory, with a test part, and the task on them that the demo trains."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.task import Batch, Goal, Indices, Loss, Task, scores_of

ByteArray = NDArray[np.uint8]
LabelArray = NDArray[np.int64]

_CROP_PADDING = 4  # pixels, customary for CIFAR (Lee et al., AISTATS 2015)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Per channel: (pixel / full_scale - mean) / deviation."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    source: str


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """uint8 images [N, height, width, channels] with int64 labels [N]."""

    images: ByteArray
    labels: LabelArray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class ImageData:
    """A data set of images, kept as uint8."""

    tasks: ClassVar["dict[Goal, type[ImageTask]]"] = {}  # the customary first; modules may add

    name: str
    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]
    full_scale: int  # the largest pixel value
    normalisation: Normalisation
    repeat: int = 1  # batches enlarge every pixel to repeat x repeat
    augment: bool = False  # True if cropping and flipping is customary for it
    left_out: tuple[str, ...] = ()  # what could not be read, with the reasons

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What models can be trained to do on images."""
        return tuple(self.tasks)

    @property
    def channels(self) -> int:
        """Channels of a stored image."""
        return int(self.train.images.shape[3])

    @property
    def image_size(self) -> int:
        """Pixels per side of a batch's images."""
        return int(self.train.images.shape[1]) * self.repeat

    @property
    def facts(self) -> Mapping[str, int]:
        """What a model factory may ask for."""
        return {
            "classes": len(self.classes),
            "channels": self.channels,
            "image_size": self.image_size,
        }

    def at_size(self, image_size: int | None) -> "ImageData":
        """Return the images enlarged to a multiple of their size; raises DataError for others."""
        if image_size is None:
            return self
        stored = int(self.train.images.shape[1])
        if image_size < stored or image_size % stored:
            raise DataError(
                f"asked for {image_size}-pixel images from {self.name!r}, which stores "
                f"{stored} pixels; try a multiple of {stored}"
            )
        return replace(self, repeat=image_size // stored)

    def make_task(
        self,
        goal: Goal,
        model: nn.Module,
        *,
        memory_format: torch.memory_format = torch.channels_last,
        augment: bool | None = None,
    ) -> Task:
        """Return the task of ``goal``; raises DataError for a model of other input channels."""
        channels = input_channels(model, self.channels)
        augment = self.augment if augment is None else augment
        return self.tasks[goal](self, channels, memory_format, augment)


def split_apart(count: int, test_fraction: float) -> tuple[LabelArray, LabelArray]:
    """Return training and test indices by a fixed shuffle, whatever a run's seed."""
    order = np.random.default_rng(0).permutation(count).astype(np.int64)
    tests = max(1, round(count * test_fraction))
    return np.sort(order[tests:]), np.sort(order[:tests])


def crop_and_flip(images: ByteArray, generator: "np.random.Generator") -> ByteArray:
    """Shift every image by up to four pixels, padded with zeros, and mirror half of them."""
    count, size = images.shape[:2]
    around = (_CROP_PADDING, _CROP_PADDING)
    padded = np.pad(images, ((0, 0), around, around, (0, 0)))
    tops, lefts = generator.integers(0, 2 * _CROP_PADDING + 1, (2, count, 1))
    mirrored = generator.random((count, 1)) < 0.5
    along = np.arange(size)
    rows = tops + along
    columns = lefts + np.where(mirrored, along[::-1], along)
    each = np.arange(count)[:, None, None]
    moved: ByteArray = padded[each, rows[:, :, None], columns[:, None, :]]
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
    """Return ``wanted``; raises DataError unless the images are grey or have as many channels."""
    if wanted == data.channels or data.channels == 1:
        return wanted
    raise DataError(
        f"the model reads {wanted} channels, but {data.name!r} has {data.channels}; "
        f"choose a model that reads {data.channels}, or grey images"
    )


def input_channels(model: nn.Module, otherwise: int) -> int:
    """Return the channels of the model's first convolution; ``otherwise`` if it has none."""
    convolutions = (each for each in model.modules() if isinstance(each, nn.Conv2d))
    return next((each.in_channels for each in convolutions), otherwise)


class ImageTask(Task):
    """The base of tasks on images, which become tensors of ``channels`` in ``memory_format``."""

    def __init__(
        self, data: ImageData, channels: int, memory_format: torch.memory_format, augment: bool
    ) -> None:
        super().__init__(len(data.train), len(data.test))
        self.data = data
        self._channels = checked_channels(data, channels)
        self.memory_format, self._augment = memory_format, augment

    def augmented(self, indices: Indices, generator: "np.random.Generator") -> Tensor:
        """Return training images, cropped and flipped if asked for."""
        images = self.data.train.images[indices]
        return self.tensor(crop_and_flip(images, generator) if self._augment else images)

    def tensor(self, images: ByteArray) -> Tensor:
        """Return stored images as a batch."""
        return to_tensor(self.data, images, self._channels, self.memory_format)


class Classification(ImageTask):
    """Cross-entropy over classes; the metric is test accuracy in percent."""

    metric_name = "test_accuracy_percent"

    def train_batch(self, indices: Indices, generator: "np.random.Generator") -> Batch:
        """Return images float32 [N, channels, size, size] and labels int64 [N]."""
        return self.augmented(indices, generator), _labels(self.data.train, indices)

    def test_batch(self, indices: Indices) -> Batch:
        """Return test images and labels, never augmented."""
        return self.tensor(self.data.test.images[indices]), _labels(self.data.test, indices)

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


ImageData.tasks[Goal.CLASSIFY] = Classification
