"""Images in folders, one folder per class (needs Pillow, the extra ``images``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daf.core.errors import DataError
from daf.training.data.images import (
    ByteArray,
    ImageData,
    LabelledImages,
    Normalisation,
    split_apart,
)

DEFAULT_SIZE = 224
IMAGENET_NORMALISATION = Normalisation(
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
    "ImageNet's mean and deviation per channel, as torchvision's published weights use them",
)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_TEST_FRACTION = 0.2
_TEST_NAMES = ("test", "val")


def load_folder(path: Path, image_size: int = DEFAULT_SIZE) -> ImageData:
    """Read every image of ``path/CLASS/*`` as ``image_size`` x ``image_size`` RGB.

    Subfolders ``train`` and ``test`` (or ``val``) are the two parts. Without them a fifth of every
    class, always the same, is the test part.

    Raises:
        DataError: Pillow or the folder is missing, there are fewer than two classes, or an image
            cannot be read.
    """
    test_folder = next((path / name for name in _TEST_NAMES if (path / name).is_dir()), None)
    if (path / "train").is_dir() and test_folder is not None:
        classes = _class_names(path / "train")
        train = _read_all(_listed(path / "train", classes), image_size)
        test = _read_all(_listed(test_folder, classes), image_size)
    else:
        classes = _class_names(path)
        train_files, test_files = _split(_listed(path, classes))
        train, test = _read_all(train_files, image_size), _read_all(test_files, image_size)
    return ImageData(
        name=f"images:{path}",
        train=train,
        test=test,
        classes=classes,
        full_scale=255,
        normalisation=IMAGENET_NORMALISATION,
    )


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


def _read_all(listing: _Listing, size: int) -> LabelledImages:
    images = np.empty((len(listing), size, size, 3), np.uint8)
    for place, (file, _) in zip(images, listing, strict=True):
        place[...] = _read_image(file, size)
    return LabelledImages(images, np.array([label for _, label in listing], np.int64))


def _read_image(file: Path, size: int) -> ByteArray:
    try:
        from PIL import Image  # an extra, used only here
    except ModuleNotFoundError as error:
        raise DataError("images:FOLDER needs Pillow; try: pip install pillow") from error
    try:
        with Image.open(file) as image:
            square = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(square, np.uint8)
    except OSError as error:
        raise DataError(f"{file} is not a whole image ({error}); replace or remove it") from error
