"""CIFAR-10: one ``.npz`` file, or the published folder of pickled batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError
from daf.training.data.images import ImageData, LabelledImages, Normalisation
from daf.training.task import MOST_CLASSES
from daf_bench.data.array_pickle import MOST_BYTES, UNREADABLE, load_arrays
from daf_bench.data.guarded_files import open_data, read_npz

CIFAR10_NORMALISATION = Normalisation(
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
    "mean and deviation per channel over the 50,000 training images / 255",
)
_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_KEYS = ("x_train", "y_train", "x_test", "y_test")
_TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST_FILE = "test_batch"


def load_cifar10(path: Path, image_size: int | None = None) -> ImageData:
    """Read CIFAR-10, enlarged to ``image_size`` pixels per side, a multiple of 32.

    ``path`` is an ``.npz`` with ``x_train, y_train, x_test, y_test`` (uint8 [N, 32, 32, 3], integer
    labels), perhaps ``classes``; or a folder with ``data_batch_1 … 5`` and ``test_batch``.

    Raises:
        DataError: the file is missing, truncated, or holds something else.
    """
    if path.is_dir():
        return _named(path, *_from_folder(path), _CLASSES).at_size(image_size)
    if not path.is_file():
        raise DataError(
            f"asked for cifar10:{path}, but there is no such file or folder; name an .npz with "
            f"{', '.join(_KEYS)}, or the unpacked folder cifar-10-batches-py"
        )
    return _named(path, *_from_npz(path)).at_size(image_size)


def _named(
    path: Path, train: LabelledImages, test: LabelledImages, classes: tuple[str, ...]
) -> ImageData:
    return ImageData(
        name=f"cifar10:{path}",
        train=train,
        test=test,
        classes=classes,
        full_scale=255,
        normalisation=CIFAR10_NORMALISATION,
        augment=True,
    )


def _from_npz(path: Path) -> tuple[LabelledImages, LabelledImages, tuple[str, ...]]:
    arrays = read_npz(path, _KEYS, ("classes",))
    names = arrays.get("classes", np.array(_CLASSES))
    if names.ndim != 1 or len(names) > MOST_CLASSES:
        raise DataError(f"{path} classes: expected at most {MOST_CLASSES} names in a row")
    classes = tuple(str(name) for name in names)
    train = _checked(f"{path} x_train", arrays["x_train"], arrays["y_train"], len(classes))
    test = _checked(f"{path} x_test", arrays["x_test"], arrays["y_test"], len(classes))
    sizes = [part.images.shape[1:] for part in (train, test)]
    if sizes[0] != sizes[1]:
        raise DataError(f"{path}: x_train holds images of {sizes[0]}, x_test of {sizes[1]}")
    return train, test, classes


def _checked(
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
    if not images.size:
        raise DataError(f"{what}: holds no images; give a file with at least one per class")
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"{what}: labels run from {labels.min()} to {labels.max()}, "
            f"but there are {classes} classes"
        )
    return LabelledImages(np.ascontiguousarray(images), labels.astype(np.int64))


def _from_folder(folder: Path) -> tuple[LabelledImages, LabelledImages]:
    batches = [_read_batch(folder / name) for name in _TRAIN_FILES]
    images = np.concatenate([batch.images for batch in batches])
    labels = np.concatenate([batch.labels for batch in batches])
    return LabelledImages(images, labels), _read_batch(folder / _TEST_FILE)


def _read_batch(path: Path) -> LabelledImages:
    if not path.exists():
        needed = ", ".join((*_TRAIN_FILES, _TEST_FILE))
        raise DataError(f"{path} is missing; a CIFAR-10 folder holds {needed}")
    try:
        with open_data(path, path.parent) as file:
            batch = load_arrays(file.read(MOST_BYTES + 1))
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{path} is not a whole CIFAR-10 batch ({error}); fetch it again"
        ) from error
    return _checked(str(path), *_arrays(path, batch), len(_CLASSES))


def _arrays(path: Path, batch: object) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    pixels = batch.get(b"data") if isinstance(batch, dict) else None
    labels = batch.get(b"labels") if isinstance(batch, dict) else None
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list) or pixels.ndim != 2:
        raise DataError(f"{path}: expected a dict with an array 'data' and a list 'labels'")
    if any(type(label) is not int or abs(label) > MOST_CLASSES for label in labels):
        raise DataError(f"{path}: expected whole numbers as labels")
    if pixels.shape[1] != 3 * 32 * 32:
        raise DataError(f"{path}: expected rows of 3072 pixels, found {pixels.shape[1]}")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(labels, np.int64)
