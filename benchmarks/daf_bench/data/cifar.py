"""CIFAR-10: one ``.npz`` file, or the published folder of pickled batches."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError
from daf.training.data.images import ImageData, LabelledImages, Normalisation

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
# What the unpickler raises for bytes that are no pickle, or a truncated one.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    pickle.UnpicklingError,
)


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
    try:
        # Opened here: numpy does not close a file that it cannot read.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            missing = [key for key in _KEYS if key not in file]
            if missing:
                raise DataError(
                    f"{path}: expected {', '.join(_KEYS)}; missing {', '.join(missing)}; "
                    f"found {', '.join(file) or 'nothing'}"
                )
            arrays = {key: file[key] for key in _KEYS}
            classes = (
                tuple(str(name) for name in file["classes"]) if "classes" in file else _CLASSES
            )
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is not a whole .npz file ({error}); it may be truncated: fetch it again"
        ) from error
    train = _checked(f"{path} x_train", arrays["x_train"], arrays["y_train"], len(classes))
    test = _checked(f"{path} x_test", arrays["x_test"], arrays["y_test"], len(classes))
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
    if not len(labels):
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
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
    except FileNotFoundError as error:
        needed = ", ".join((*_TRAIN_FILES, _TEST_FILE))
        raise DataError(f"{path} is missing; a CIFAR-10 folder holds {needed}") from error
    except _UNREADABLE as error:
        raise DataError(
            f"{path} is not a whole CIFAR-10 batch ({error}); fetch it again"
        ) from error
    return _checked(str(path), *_arrays(path, batch), len(_CLASSES))


def _arrays(path: Path, batch: object) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    pixels = batch.get(b"data") if isinstance(batch, dict) else None
    labels = batch.get(b"labels") if isinstance(batch, dict) else None
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list) or pixels.ndim != 2:
        raise DataError(f"{path}: expected a dict with an array 'data' and a list 'labels'")
    if pixels.shape[1] != 3 * 32 * 32:
        raise DataError(f"{path}: expected rows of 3072 pixels, found {pixels.shape[1]}")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.asarray(labels)


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler of NumPy arrays and plain containers only: a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        return _allowed(module, name)


def _allowed(module: str, name: str) -> Callable[..., Any]:
    if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        rebuild: Any = np.empty(0).__reduce__()[0]
        return rebuild  # type: ignore[no-any-return]
    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _encode_latin1,  # how Python 3 writes bytes for Python 2
    }
    if (module, name) not in known:
        raise pickle.UnpicklingError(f"it asks to run {module}.{name}, which no image data needs")
    return known[module, name]


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {encoding!r}")
    return text.encode("latin1")
