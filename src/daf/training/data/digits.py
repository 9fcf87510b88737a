"""scikit-learn's handwritten digits, read from its package without importing it.

1,797 grey images of 8x8 pixels, 0 to 16 (UCI *Optical Recognition of Handwritten Digits*, test
part). Importing scikit-learn would add scipy and some 60 MB to the process.
"""

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np

from daf.core.errors import DataError
from daf.training.data.images import ImageData, LabelledImages, Normalisation, split_apart

_SIZE = 8
_REPEAT = 4  # to 32x32, the input size of the CIFAR networks
_TEST_FRACTION = 0.2
_NORMALISATION = Normalisation((0.305,), (0.376,), "mean and deviation over all 1,797 images / 16")


def load_digits(image_size: int | None = None) -> ImageData:
    """Read the digits; a fifth of them, always the same, are the test part.

    ``image_size``: pixels per side, a multiple of 8 (None: 32). Raises DataError for other sizes,
    and if scikit-learn is missing or its file is damaged.
    """
    table = _read(_packaged_file())
    images = table[:, :-1].reshape(-1, _SIZE, _SIZE, 1)
    labels = table[:, -1].astype(np.int64)
    train, test = split_apart(len(labels), _TEST_FRACTION)
    return ImageData(
        name="digits",
        train=LabelledImages(images[train], labels[train]),
        test=LabelledImages(images[test], labels[test]),
        classes=tuple("0123456789"),
        full_scale=16,
        normalisation=_NORMALISATION,
        repeat=_REPEAT,
    ).at_size(image_size)


def _packaged_file() -> Path:
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError(
            "asked for 'digits', which come with scikit-learn, but that is not installed; "
            "try: pip install 'daf-train[demo]', or name other data"
        )
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def _read(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    try:
        with gzip.open(path, "rt") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"cannot read scikit-learn's digits at {path}: {error}; try reinstalling scikit-learn"
        ) from error
    if table.shape[1] != _SIZE * _SIZE + 1:
        raise DataError(f"{path}: expected 65 columns, found {table.shape[1]}")
    return table
