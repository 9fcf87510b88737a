"""CIFAR-10 and CIFAR-100: one ``.npz`` file, or the published folder of pickled batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError
from daf.training.data.images import ImageData, LabelledImages, Normalisation
from daf.training.task import MOST_CLASSES
from daf_bench.data.array_pickle import MOST_BYTES, UNREADABLE, load_arrays
from daf_bench.data.guarded_files import open_data, read_npz

_OVER_TRAINING = "mean and deviation per channel over the 50,000 training images / 255"
CIFAR10_NORMALISATION = Normalisation(
    (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), _OVER_TRAINING
)
CIFAR100_NORMALISATION = Normalisation(
    (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), _OVER_TRAINING
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
_CLASS_NAMES = b"fine_label_names"
_MOST_META_BYTES = 10**6  # the published one has 1.5 kB


@dataclass(frozen=True, slots=True)
class _Form:
    """What tells one data set's published files from the other's."""

    name: str
    title: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str | None  # the file that names the classes
    labels: bytes
    most_bytes: int  # of a batch
    classes: tuple[str, ...]  # where no file names them
    normalisation: Normalisation

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, *([self.meta] if self.meta else []))


_CIFAR10 = _Form(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    meta=None,
    labels=b"labels",
    most_bytes=MOST_BYTES,
    classes=_CLASSES,
    normalisation=CIFAR10_NORMALISATION,
)
_CIFAR100 = _Form(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    labels=b"fine_labels",
    most_bytes=160 * 10**6,  # the published training images are one batch of 155 MB
    classes=tuple(map(str, range(100))),
    normalisation=CIFAR100_NORMALISATION,
)


def load_cifar10(path: Path, image_size: int | None = None) -> ImageData:
    """Read CIFAR-10, enlarged to ``image_size`` pixels per side, a multiple of 32.

    ``path`` is an ``.npz`` with ``x_train, y_train, x_test, y_test`` (uint8 [N, 32, 32, 3], integer
    labels), perhaps ``classes``; or a folder with ``data_batch_1 … 5`` and ``test_batch``.

    Raises:
        DataError: the file is missing, truncated, or holds something else.
    """
    return _load(_CIFAR10, path).at_size(image_size)


def load_cifar100(path: Path, image_size: int | None = None) -> ImageData:
    """Read CIFAR-100 with its 100 fine labels; sizes and ``.npz`` as ``load_cifar10``'s.

    A folder holds ``train``, ``test`` and ``meta``, which names the classes. In an ``.npz`` without
    ``classes`` their numbers do.

    Raises:
        DataError: a file is missing, truncated, or holds something else.
    """
    return _load(_CIFAR100, path).at_size(image_size)


def _load(form: _Form, path: Path) -> ImageData:
    if path.is_dir():
        return _named(form, path, *_from_folder(form, path))
    if not path.is_file():
        raise DataError(
            f"asked for {form.name}:{path}, but there is no such file or folder; name an .npz with "
            f"{', '.join(_KEYS)}, or the unpacked folder {form.folder}"
        )
    return _named(form, path, *_from_npz(form, path))


def _named(
    form: _Form, path: Path, train: LabelledImages, test: LabelledImages, classes: tuple[str, ...]
) -> ImageData:
    return ImageData(
        name=f"{form.name}:{path}",
        train=train,
        test=test,
        classes=classes,
        full_scale=255,
        normalisation=form.normalisation,
        augment=True,
    )


def _from_npz(form: _Form, path: Path) -> tuple[LabelledImages, LabelledImages, tuple[str, ...]]:
    arrays = read_npz(path, _KEYS, ("classes",))
    names = arrays.get("classes", np.array(form.classes))
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


def _from_folder(
    form: _Form, folder: Path
) -> tuple[LabelledImages, LabelledImages, tuple[str, ...]]:
    classes = form.classes if form.meta is None else _class_names(form, folder / form.meta)
    batches = [_read_batch(form, folder / name, len(classes)) for name in form.train]
    images = np.concatenate([batch.images for batch in batches])
    labels = np.concatenate([batch.labels for batch in batches])
    test = _read_batch(form, folder / form.test, len(classes))
    return LabelledImages(images, labels), test, classes


def _class_names(form: _Form, path: Path) -> tuple[str, ...]:
    names = _unpickled(form, path, _MOST_META_BYTES).get(_CLASS_NAMES)
    if not isinstance(names, list) or any(type(name) is not bytes for name in names):
        raise DataError(f"{path}: expected a dict with a list of names '{_CLASS_NAMES.decode()}'")
    try:
        classes = tuple(name.decode().strip() for name in names)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected names of classes in UTF-8 ({error})") from error
    wanted, different = len(form.classes), len(set(classes) - {""})
    if len(classes) != wanted or different != wanted:
        raise DataError(
            f"{path}: expected {wanted} different names of classes, "
            f"found {len(classes)}, of which {different} differ"
        )
    return classes


def _read_batch(form: _Form, path: Path, classes: int) -> LabelledImages:
    batch = _unpickled(form, path, form.most_bytes)
    return _checked(str(path), *_arrays(form, path, batch), classes)


def _unpickled(form: _Form, path: Path, most_bytes: int) -> dict[bytes, object]:
    """Return the dict that a file pickles; an empty one if it is something else."""
    if not path.exists():
        raise DataError(f"{path} is missing; a {form.title} folder holds {', '.join(form.files)}")
    try:
        with open_data(path, path.parent) as file:
            content = load_arrays(file.read(most_bytes + 1), most_bytes)
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{path} is not a whole {form.title} file ({error}); fetch it again"
        ) from error
    return content if isinstance(content, dict) else {}


def _arrays(
    form: _Form, path: Path, batch: dict[bytes, object]
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    pixels, labels = batch.get(b"data"), batch.get(form.labels)
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list) or pixels.ndim != 2:
        raise DataError(
            f"{path}: expected a dict with an array 'data' and a list '{form.labels.decode()}', "
            f"as {form.title} has"
        )
    if any(type(label) is not int or abs(label) > MOST_CLASSES for label in labels):
        raise DataError(f"{path}: expected whole numbers as labels")
    if pixels.shape[1] != 3 * 32 * 32:
        raise DataError(f"{path}: expected rows of 3072 pixels, found {pixels.shape[1]}")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(labels, np.int64)
