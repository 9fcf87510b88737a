"""Inputs for the kernel tests, the same on every machine: made by Philox, never by a library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded import Guarded
from reference.elements import element_dtype, narrow
from reference.philox import philox_words

from daf.core.code_format import FORMAT_VERSION, ElementType
from daf.kernels.cpu.instruction_sets import instruction_sets, use_instruction_set

INPUT_STREAM = 7
ELEMENT_TYPES = tuple(ElementType)
EXTREMES = np.array(
    [
        *(0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF),
        *(0xFF7FFFFF, 0x7F000000, 0x00010000, 0x0000FFFF, 0x33800000, 0x4B800000, 0x3F7FFFFF),
    ],
    np.uint32,
).view(np.float32)


class Cases:
    """Makers of inputs; ``seed`` is a Philox key."""

    extremes = EXTREMES

    def lines(self, seed: int, bits: int) -> np.ndarray:
        """Borders, scales and shifts of lines of a derivative, over unit Gaussians and beyond."""
        borders = np.sort(self.gaussian(15, seed))
        numbers = self.gaussian(32, seed + 1) * np.float32(2**bits)
        return np.concatenate([borders, numbers]).astype(np.float32)

    def words(self, count: int, seed: int) -> np.ndarray:
        blocks = np.arange(-(-count // 256), dtype=np.uint64)
        words = philox_words(seed, blocks, np.arange(64, dtype=np.uint64), INPUT_STREAM)
        return words.reshape(-1)[:count]

    def smooth(self, count: int, seed: int = 1) -> np.ndarray:
        """Triangular noise, its scale and offset changing from block to block."""
        pieces = []
        for start in range(0, count, 2**20):
            words = self.words(2**20, seed + start)[: count - start]
            block = (start + np.arange(len(words))) // 256
            noise = (words & 0xFFFF).astype(np.int32) + (words >> 16).astype(np.int32) - 65535
            scale = np.exp2((block % 5 - 17).astype(np.float32))
            offset = (block % 7 - 3).astype(np.float32) * np.float32(0.375)
            pieces.append(noise.astype(np.float32) * scale + offset)
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)

    def gaussian(self, count: int, seed: int = 1) -> np.ndarray:
        """Independent unit Gaussians in float32."""
        return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)

    def wild(self, count: int, seed: int = 1) -> np.ndarray:
        """Any finite exponent from block to block, denormals and signed zeros mixed in."""
        words = self.words(count, seed)
        exponent = (np.arange(count) // 256 * 37 + (words >> 8) % 24) % 255
        pattern = (words & np.uint32(0x807FFFFF)) | (exponent.astype(np.uint32) << 23)
        values = np.where(words % 11 == 0, np.uint32(0), pattern).astype(np.uint32)
        return values.view(np.float32)

    def peaked(self, count: int, seed: int = 1) -> np.ndarray:
        """``smooth`` with a thirtieth of its elements larger, by more from block to block."""
        growth = np.exp2((np.arange(count) // 256 % 12).astype(np.float32))
        chosen = self.words(count, seed + 1) % 30 == 0
        return np.where(chosen, self.smooth(count, seed) * growth, self.smooth(count, seed))

    def broken(self, count: int, seed: int = 1) -> np.ndarray:
        """``smooth`` with an inf, a -inf and a NaN far apart."""
        values = self.smooth(count, seed)
        for place, value in ((0.1, np.inf), (0.5, -np.inf), (0.8, np.nan)):
            values[int(place * count)] = value
        return values

    def mixed(self, count: int, seed: int = 1) -> np.ndarray:
        """The extremes repeated in a different order in every block, and mild numbers."""
        words = self.words(count, seed)
        picked = EXTREMES[(words >> 3) % len(EXTREMES)]
        return np.where(words % 4 == 0, picked, self.smooth(count, seed))

    def guarded(self, count: int, dtype: Any, offset: int = 0) -> Guarded:
        return Guarded(count, dtype, offset)

    def as_type(self, values: np.ndarray, element_type: ElementType) -> np.ndarray:
        with np.errstate(all="ignore"):
            return narrow(values, element_type)

    def dtype(self, element_type: ElementType) -> np.dtype[Any]:
        return element_dtype(element_type)

    def digest(self, *arrays: np.ndarray) -> str:
        hasher = hashlib.sha256()
        for array in arrays:
            hasher.update(np.ascontiguousarray(array).tobytes())
        return hasher.hexdigest()


@pytest.fixture(scope="session")
def cases() -> Cases:
    return Cases()


@pytest.fixture(params=instruction_sets())
def instruction_set(request):
    with use_instruction_set(request.param):
        yield request.param


@pytest.fixture(scope="session")
def on_every_set() -> Callable[[Callable[[], None]], None]:
    """Runs a check with each instruction set, against answers that the oracle gave once for all."""

    def run(check: Callable[[], None]) -> None:
        for name in instruction_sets():
            with use_instruction_set(name):
                try:
                    check()
                except AssertionError as problem:
                    problem.add_note(f"on {name}")
                    raise

    return run


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The pinned bytes (as hashes) of the present format."""
    path = Path(__file__).parent / "golden" / f"format_{FORMAT_VERSION}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found
