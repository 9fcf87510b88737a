"""A text file as bytes; the last tenth is the test part."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daf.core.errors import DataError
from daf.training.data.contents import TextData

DEFAULT_CONTEXT = 128
_TEST_FRACTION = 0.1


def load_text(path: Path, context: int = DEFAULT_CONTEXT) -> TextData:
    """Read ``path`` for byte-level language modelling in windows of ``context`` bytes.

    Raises:
        DataError: the file is missing, or its test part is shorter than one window.
    """
    try:
        contents = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"asked for text:{path}, but it cannot be read: {error}") from error
    tests = int(len(contents) * _TEST_FRACTION)
    if tests < context + 1:
        raise DataError(
            f"{path} has {len(contents)} bytes; its last tenth must hold a window of {context} and "
            f"one byte: give a text of at least {10 * (context + 1)} bytes or a smaller --context"
        )
    return TextData(f"text:{path}", contents[:-tests], contents[-tests:], context)
