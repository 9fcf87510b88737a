"""Memory with guards around it, for elements and for codes."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference.codecs import Code

from daf.core.code_format import block_count, words_per_plane
from daf.kernels import PageFields

POISON = 0xA5
GUARD_BYTES = 64


class Guarded:
    """Fresh memory full of rubbish, at any address, guarded before and behind."""

    def __init__(self, count: int, dtype: Any, offset: int = 0) -> None:
        self.dtype = np.dtype(dtype)
        self._start = GUARD_BYTES + offset
        self._stop = self._start + count * self.dtype.itemsize
        self._memory = np.full(self._stop + GUARD_BYTES, POISON, np.uint8)

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data) + self._start

    def fill(self, values: np.ndarray) -> Guarded:
        self._memory[self._start : self._stop] = (
            np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        )
        return self

    def opened(self) -> np.ndarray:
        """What was written, once the guards prove untouched."""
        assert (self._memory[: self._start] == POISON).all(), "wrote before the start"
        assert (self._memory[self._stop :] == POISON).all(), "wrote beyond the end"
        return self._memory[self._start : self._stop].copy().view(self.dtype)


class FlatCode:
    """Room for a code in one run: planes, then headers; ``fields`` is what the kernels take."""

    def __init__(self, count: int, bits: int, *, headers: bool = True, offset: int = 0) -> None:
        self._plane_words = bits * words_per_plane(count)
        words = self._plane_words + headers * block_count(count)
        self._bits, self._memory = bits, Guarded(words, np.uint32, offset)
        self.fields = PageFields.flat(self._memory.address, count, bits)

    @classmethod
    def of(cls, planes: np.ndarray, headers: np.ndarray, count: int, bits: int) -> FlatCode:
        """A code of which only the first planes are left; the others are rubbish."""
        found = cls(count, bits)
        memory = found._memory.opened()
        memory[: planes.size] = planes.reshape(-1)
        memory[found._plane_words :] = np.ascontiguousarray(headers).reshape(-1).view(np.uint32)
        found._memory.fill(memory)
        found.fields = found.fields._replace(kept=len(planes))
        return found

    @property
    def planes(self) -> np.ndarray:
        """(bits, words), once the guards prove untouched."""
        return self._memory.opened()[: self._plane_words].reshape(self._bits, -1)

    @property
    def code(self) -> Code:
        """Planes, and headers (blocks, 2)."""
        headers = self._memory.opened()[self._plane_words :].view(np.uint16).reshape(-1, 2)
        return Code(self.planes, headers)
