"""The processor's kernels where the device's stand: codes in a device's pages, without Triton.

What was given up is gone, so that gradients are those of the planes that are left. Working
memory is mapped: what NumPy allocates may count as the simulated device's, and be refused.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import native_calls
import numpy as np
import numpy.typing as npt
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS, ElementType, block_count, words_per_plane
from daf.core.policy import Method
from daf.kernels import Codec, PageFields
from daf.kernels.normalisation import CodedValues, Decoding, ElementCode, Encoding
from daf.kernels.triton.planes import DevicePlanes

Words = npt.NDArray[np.int32]
FLOAT32 = ElementType.FLOAT32


def mapped(words: int) -> Words:
    """So many words of zeros, which no allocator is asked for."""
    return np.frombuffer(mmap.mmap(-1, 4 * words), np.int32)


def pages_of(planes: DevicePlanes, plane: int) -> list[Words]:
    """The words of a plane, page by page, as far as it is there; ``plane`` = bits: headers."""
    are_headers = plane == planes.bits
    if planes.table is None:
        whole = planes.headers if are_headers else planes.region[plane]
        assert whole is not None
        return [whole.numpy()]
    words = block_count(planes.elements) if are_headers else words_per_plane(planes.elements)
    if not are_headers and plane == planes.kept - 1:
        words = min(words, planes.full_runs * planes.page_words)
    table = planes.table.numpy()[plane * planes.runs :].tolist()
    found = []
    for page, first in enumerate(range(0, words, planes.page_words)):
        size = min(planes.page_words, words - first)
        memory = (ctypes.c_int32 * size).from_address(planes.region.data_ptr() + 4 * table[page])
        found.append(np.frombuffer(memory, np.int32))
    return found


def write(planes: DevicePlanes, plane: int, words: Words) -> None:
    """As much of a plane's words as there are pages for."""
    first = 0
    for page in pages_of(planes, plane):
        page[:] = words[first : first + len(page)]
        first += len(page)


def read(planes: DevicePlanes, plane: int) -> Words:
    """Zeros where pages are gone."""
    words = mapped(words_per_plane(planes.elements))
    first = 0
    for page in pages_of(planes, plane):
        words[first : first + len(page)] = page
        first += len(page)
    return words


def _scratch(planes: DevicePlanes) -> tuple[Words, PageFields]:
    """A row for each plane and one for the headers, on the processor."""
    rows, width = planes.bits + 1, words_per_plane(planes.elements)
    words = mapped(rows * width).reshape(rows, width)
    return words, PageFields.flat(words.ctypes.data, planes.elements, planes.bits)


def _written(planes: DevicePlanes, words: Words) -> None:
    for plane in range(planes.kept):
        write(planes, plane, words[plane])
    write(planes, planes.bits, words[planes.bits][: block_count(planes.elements)])


def _read(planes: DevicePlanes) -> tuple[Words, PageFields]:
    words, fields = _scratch(planes)
    for plane in range(planes.kept):
        words[plane] = read(planes, plane)
    words[planes.bits] = read(planes, planes.bits)
    return words, fields


def encode_rotated(source: Tensor, planes: DevicePlanes, key: int, affine: None = None) -> None:
    """``gpu.encode_rotated`` of float32."""
    assert affine is None
    words, fields = _scratch(planes)
    native_calls.encode_rotated(source.data_ptr(), FLOAT32, fields, key, 1)
    _written(planes, words)


def decode_rotated(planes: DevicePlanes, key: int, destination: Tensor, *more: Any) -> None:
    """``gpu.decode_rotated``: runs that lost their last plane come from those before."""
    assert not any(more)
    words, fields = _read(planes)
    blocks = block_count(planes.elements)
    whole = blocks
    if planes.full_runs < planes.runs:
        whole = planes.full_runs * planes.page_words * 32 // BLOCK_ELEMENTS
    for kept, first, last in ((planes.kept, 0, whole), (planes.kept - 1, whole, blocks)):
        if first < last:
            left = fields._replace(kept=kept)
            place = destination.data_ptr() + 4 * first * BLOCK_ELEMENTS
            native_calls.decode_rotated(left, key, place, FLOAT32, 1, blocks=(first, last))
    del words


def encode_minmax(source: Tensor, planes: DevicePlanes, key: int, affine: None = None) -> None:
    """``gpu.encode_minmax`` of float32."""
    assert affine is None
    words, fields = _scratch(planes)
    native_calls.encode_minmax(source.data_ptr(), FLOAT32, fields, key, 1)
    _written(planes, words)


def decode_minmax(planes: DevicePlanes, destination: Tensor, *more: Any) -> None:
    """``gpu.decode_minmax``."""
    assert planes.is_whole
    assert not any(more)
    words, fields = _read(planes)
    native_calls.decode_minmax(fields, destination.data_ptr(), FLOAT32, 1)
    del words


def encode_mask(source: Tensor, planes: DevicePlanes, code: ElementCode) -> None:
    """``gpu.encode_elements`` of a mask of float32."""
    words, fields = _scratch(planes)
    bounds = (code.predicate, code.low, code.high)
    native_calls.encode_mask(source.data_ptr(), FLOAT32, fields, *bounds, 1)
    write(planes, 0, words[0])


def decode_mask(planes: DevicePlanes, destination: Tensor, code: ElementCode) -> None:
    """``gpu.decode_elements`` of a mask."""
    words = read(planes, 0)
    fields = PageFields.flat(words.ctypes.data, planes.elements, 1)
    native_calls.decode_mask(fields, code.low, code.high, destination.data_ptr(), FLOAT32, 1)


class PagedBackend:
    """The same as a backend, of masks and values in float32 alone."""

    def encode_values(self, code: CodedValues, encoding: Encoding) -> bool:
        assert not any(encoding[1:])
        treatment, source = code.treatment, encoding.source
        if treatment.method is Method.ROTATED:
            encode_rotated(source, code.planes, code.key)
        else:
            encode_minmax(source, code.planes, code.key)
        return True

    def decode_values(self, code: CodedValues, decoding: Decoding) -> None:
        out, *more = decoding
        if code.treatment.method is Method.ROTATED:
            decode_rotated(code.planes, code.key, out, *more)
        else:
            decode_minmax(code.planes, out, *more)

    def encode_elements(self, source: Tensor, planes: DevicePlanes, code: ElementCode) -> bool:
        assert code.codec is Codec.MASK
        encode_mask(source, planes, code)
        return False

    def decode_elements(self, planes: DevicePlanes, out: Tensor, code: ElementCode) -> None:
        assert code.codec is Codec.MASK
        decode_mask(planes, out, code)
