"""Decoding whatever bytes there are: the oracle's answer, and nothing beside the destination."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import codecs as reference
from reference.elements import element_dtype
from test_cpu import Native, same_bytes

from daf.core.code_format import ElementType, block_count, words_per_plane
from daf.kernels.cpu.instruction_sets import instruction_sets, use_instruction_set

ELEMENT_TYPES = st.sampled_from(ElementType)
COUNTS = st.integers(1, 700)


def array(draw, size: int, dtype) -> np.ndarray:
    """Any bytes at all."""
    size_bytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(draw(st.binary(min_size=size_bytes, max_size=size_bytes)), dtype)


@st.composite
def codes(draw, most_bits: int) -> tuple[reference.Code, reference.Target]:
    """Planes, headers and everything that ``Target`` knows."""
    count, element_type, bits = draw(COUNTS), draw(ELEMENT_TYPES), draw(st.integers(1, most_bits))
    words = words_per_plane(count)
    planes = array(draw, bits * words, np.uint32).reshape(bits, words)
    headers = array(draw, 2 * block_count(count), np.uint16).reshape(-1, 2)
    onto = array(draw, count, element_dtype(element_type)) if draw(st.booleans()) else None
    mask = array(draw, words, np.uint32).reshape(1, words) if draw(st.booleans()) else None
    return reference.Code(planes, headers), reference.Target(count, element_type, onto, mask)


def every_set_gives(decode, expected: np.ndarray) -> None:
    for name in instruction_sets():
        with use_instruction_set(name):
            same_bytes(decode(), expected)


@settings(deadline=None)
@given(codes(4), st.integers(0, 3), st.integers(0, 2**64 - 1))
def test_rotated(drawn, dropped, key) -> None:
    code, target = drawn
    bits, dtype = min(4, len(code.planes) + dropped), element_dtype(target.element_type)
    every_set_gives(
        lambda: Native().decode_rotated(code, target, dtype, bits, key),
        reference.decode_rotated(code, target, bits, key),
    )


@settings(deadline=None)
@given(codes(8))
def test_minmax(drawn) -> None:
    code, target = drawn
    bits, dtype = len(code.planes), element_dtype(target.element_type)
    every_set_gives(
        lambda: Native().decode_minmax(code, target, dtype, bits),
        reference.decode_minmax(code, target, bits),
    )
