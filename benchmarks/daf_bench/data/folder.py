"""Images in folders, one folder per class (needs Pillow, the extra ``images``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daf.core.errors import DataError
from daf.training.data.images import ImageData, LabelledImages, Normalisation, split_apart
from daf_bench.data.image_file import read_image

DEFAULT_SIZE = 224
IMAGENET_NORMALISATION = Normalisation(
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
    "ImageNet's mean and deviation per channel, as torchvision's published weights use them",
)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_TEST_FRACTION = 0.2
_TEST_NAMES = ("test", "val")
_MOST_NAMED = 10


def load_folder(
    path: Path, image_size: int = DEFAULT_SIZE, leave_out_unreadable: bool = False
) -> ImageData:
    """Read every image of ``path/CLASS/*`` as ``image_size`` x ``image_size`` RGB.

    Subfolders ``train`` and ``test`` (or ``val``) are the two parts. Without them a fifth of every
    class, always the same, is the test part.

    Raises:
        DataError: Pillow or the folder is missing, there are fewer than two classes, or an image
            cannot be read; ``leave_out_unreadable`` leaves such images out.
    """
    test_folder = next((path / name for name in _TEST_NAMES if (path / name).is_dir()), None)
    if (path / "train").is_dir() and test_folder is not None:
        classes = _class_names(path / "train")
        parts = [_listed(path / "train", classes), _listed(test_folder, classes)]
    else:
        classes = _class_names(path)
        parts = list(_split(_listed(path, classes)))
    trouble: list[str] = []
    train, test = (_read_all(path, part, image_size, trouble) for part in parts)
    if trouble and not leave_out_unreadable:
        raise DataError(
            f"{len(trouble)} of {len(parts[0]) + len(parts[1])} images in {path} cannot be read: "
            f"{'; '.join(trouble[:_MOST_NAMED])}{'; …' if len(trouble) > _MOST_NAMED else ''}: "
            "mend or remove them, or leave them out by --leave-out-unreadable"
        )
    for part in (train, test):
        _refuse_empty_classes(path, part, classes)
    return ImageData(
        name=f"images:{path}",
        train=train,
        test=test,
        classes=classes,
        full_scale=255,
        normalisation=IMAGENET_NORMALISATION,
        left_out=tuple(trouble),
    )


def _refuse_empty_classes(path: Path, part: LabelledImages, classes: tuple[str, ...]) -> None:
    present = set(part.labels.tolist())
    empty = [name for label, name in enumerate(classes) if label not in present]
    if empty:
        raise DataError(f"{path}: no image of {', '.join(empty)} can be read; add some")


_Listing = list[tuple[Path, int]]


def _class_names(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"asked for images:{folder}, but there is no such folder")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if len(names) < 2:
        raise DataError(
            f"{folder}: expected one folder per class, at least two; found {len(names)}"
        )
    return tuple(names)


def _listed(folder: Path, classes: tuple[str, ...]) -> _Listing:
    listing: _Listing = []
    for label, name in enumerate(classes):
        place = folder / name
        files = sorted(place.iterdir()) if place.is_dir() else []
        images = [file for file in files if file.suffix.lower() in _SUFFIXES]
        if not images:
            raise DataError(f"{place}: holds no images; known endings: {', '.join(_SUFFIXES)}")
        listing += [(file, label) for file in images]
    return listing


def _split(listing: _Listing) -> tuple[_Listing, _Listing]:
    train: _Listing = []
    test: _Listing = []
    for label in sorted({label for _, label in listing}):
        of_class = [entry for entry in listing if entry[1] == label]
        if len(of_class) < 2:
            raise DataError(
                f"{of_class[0][0].parent}: one image cannot be both trained on and tested; add more"
            )
        train_part, test_part = split_apart(len(of_class), _TEST_FRACTION)
        train += [of_class[i] for i in train_part]
        test += [of_class[i] for i in test_part]
    return train, test


def _read_all(folder: Path, listing: _Listing, size: int, trouble: list[str]) -> LabelledImages:
    """Return the images that can be read; append a sentence on each of the others."""
    try:
        images = np.empty((len(listing), size, size, 3), np.uint8)
    except (MemoryError, ValueError) as error:
        raise DataError(f"asked for {len(listing)} images of {size} x {size}: {error}") from error
    labels = []
    for file, label in listing:
        try:
            images[len(labels)] = read_image(folder, file, size)
            labels.append(label)
        except DataError as error:
            trouble.append(str(error))
    return LabelledImages(images[: len(labels)], np.array(labels, np.int64))
