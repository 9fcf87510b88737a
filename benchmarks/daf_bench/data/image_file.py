"""One image file, decoded in bounded memory (needs Pillow, the extra ``images``)."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from daf.core.errors import DataError
from daf.training.data.images import ByteArray
from daf_bench.data.guarded_files import open_data

_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # Pillow knows some that run code
_MOST_BYTES = 150 * 10**6  # of a decoded image and its conversion
_MODES: dict[str, int] = {"1": 1, "L": 1, "P": 1, "LA": 4, "I;16": 2}  # bytes a pixel; others 4
_RGB_BYTES = 4  # as Pillow holds a pixel
_DECODER_BYTES = {"WEBP": 12, "TIFF": 4}  # a pixel, beside the image
_PROGRESSIVE_BYTES = 6  # a pixel of a whole progressive JPEG: its coefficients
# What Pillow's decoders raise for damaged files.
_UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(SyntaxError, RuntimeError, MemoryError, AssertionError, struct.error, zlib.error, Warning),
)


def read_image(folder: Path, file: Path, size: int) -> ByteArray:
    """Return an image as uint8 [size, size, 3].

    ``folder``: that it must really lie in. Raises DataError if it cannot be read, or not in
    bounded memory.
    """
    try:
        from PIL import Image  # an extra, used only here
    except ModuleNotFoundError as error:
        raise DataError("images:FOLDER needs Pillow; try: pip install pillow") from error
    try:
        with (
            _quiet(Image.DecompressionBombWarning),
            io.BufferedReader(open_data(file, folder)) as opened,
            Image.open(opened, formats=_FORMATS) as image,
        ):
            _refuse_large(image, file, size)
            colours = image if image.mode == "RGB" else image.convert("RGB")
            square = colours.resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(square, np.uint8)
    except DataError:
        raise
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not a whole image ({error})") from error


@contextmanager
def _quiet(refused: type[Warning]) -> Iterator[None]:
    """Raise warnings of this kind, and show no others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", refused)
        yield


def _refuse_large(image: Any, file: Path, size: int) -> None:
    """Let a JPEG be decoded at a part of its size; raise DataError if too much is left."""
    width, height = image.size
    progressive = _PROGRESSIVE_BYTES if image.info.get("progressive") else 0
    image.draft("RGB", (size, size))
    converted = 0 if image.mode == "RGB" else _RGB_BYTES
    nbytes = _MODES.get(image.mode, 4) + converted + _DECODER_BYTES.get(image.format, 0)
    decoded = image.width * image.height * nbytes + width * height * progressive
    if max(decoded, 2 * file.stat().st_size) > _MOST_BYTES:
        raise DataError(
            f"{file} of {width} x {height} pixels would take {decoded} bytes, of {_MOST_BYTES} at "
            "most; make it smaller"
        )
