"""Planes written by a test, as codes write theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def writing(tensor: Any) -> Iterator[Any]:
    """Yield where to write, and seal afterwards; not after an error."""
    with tensor.filling() as planes:
        yield planes
    tensor.seal()
