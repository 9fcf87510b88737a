"""A data set in memory: images or bytes, each with a test part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError

ByteArray = NDArray[np.uint8]
LabelArray = NDArray[np.int64]
MASK_SYMBOL = 256
VOCABULARY = 257  # every byte, and the mask symbol


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
    """A data set of images, kept as uint8.

    ``full_scale`` is the largest pixel value. Batches enlarge every pixel to repeat x repeat.
    ``augment``: True if cropping and flipping is customary for it.
    """

    name: str
    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]
    full_scale: int
    normalisation: Normalisation
    repeat: int = 1
    augment: bool = False

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

    def at_size(self, image_size: int) -> ImageData:
        """Return the images with each pixel repeated up to ``image_size`` pixels per side.

        Raises:
            DataError: ``image_size`` is no multiple of the stored size.
        """
        stored = int(self.train.images.shape[1])
        if image_size < stored or image_size % stored:
            raise DataError(
                f"asked for {image_size}-pixel images from {self.name!r}, which stores "
                f"{stored} pixels; try a multiple of {stored}"
            )
        return replace(self, repeat=image_size // stored)


@dataclass(frozen=True, slots=True)
class TextData:
    """A text as bytes, split into windows of ``context`` bytes in batches."""

    name: str
    train: ByteArray
    test: ByteArray
    context: int

    @property
    def facts(self) -> Mapping[str, int]:
        """What a model factory may ask for."""
        return {"vocabulary": VOCABULARY, "context": self.context}


def checked_images(
    what: str, images: NDArray[np.generic], labels: NDArray[np.generic], classes: int
) -> LabelledImages:
    """Return images and labels as one value, after checking both.

    Raises:
        DataError: shapes, types, counts or label values are not what ``what`` promises.
    """
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[1] != images.shape[2]:
        raise DataError(
            f"{what}: expected square uint8 images [N, size, size, channels], "
            f"found {images.dtype} {list(images.shape)}"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(
            f"{what}: expected {len(images)} whole-number labels, "
            f"found {labels.dtype} {list(labels.shape)}"
        )
    if not len(labels):
        raise DataError(f"{what}: holds no images; give a file with at least one per class")
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"{what}: labels run from {labels.min()} to {labels.max()}, "
            f"but there are {classes} classes"
        )
    return LabelledImages(np.ascontiguousarray(images), labels.astype(np.int64))


def split_apart(count: int, test_fraction: float) -> tuple[LabelArray, LabelArray]:
    """Return training and test indices by a fixed shuffle, whatever a run's seed."""
    order = np.random.default_rng(0).permutation(count).astype(np.int64)
    tests = max(1, round(count * test_fraction))
    return np.sort(order[tests:]), np.sort(order[:tests])
