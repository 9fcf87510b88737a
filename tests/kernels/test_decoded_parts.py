"""Decoding some of a tensor's blocks, against the oracle's decoding of the whole tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import native_calls
import numpy as np
import pytest
from guarded import FlatCode
from native_calls import affine_of
from reference import codecs as reference

from daf.core.code_format import ElementType, Predicate, block_count
from daf.core.errors import KernelError
from daf.kernels import PageFields

KEY = 0x0FEDCBA987654321
F32 = ElementType.FLOAT32
TYPES = tuple(ElementType)
CODECS = ("rotated", "minmax")
BITS = {"rotated": 3, "minmax": 5}


class Coded:
    """A code as the oracle makes it, decoded by the kernels."""

    def __init__(self, codec: str, code: reference.Code, count: int, threads: int = 1) -> None:
        self._codec, self._threads, self._count = codec, threads, count
        self._room = FlatCode.of(*code, count, BITS[codec])

    def decode(self, address: int, element_type=F32, *, mask=None, **options: Any) -> None:
        options["affine"] = affine_of(options.get("affine"))
        if mask is not None:
            options["mask"] = PageFields.flat(mask.ctypes.data, self._count, 1)
        settings = (KEY,) if self._codec == "rotated" else ()
        getattr(native_calls, f"decode_{self._codec}")(
            *(self._room.fields, *settings, address, element_type, self._threads), **options
        )


def oracle_code(codec: str, source: np.ndarray, affine=None) -> reference.Code:
    if codec == "rotated":
        return reference.encode_rotated(source, BITS[codec], KEY, affine)
    return reference.encode_minmax(source, BITS[codec], KEY, affine)


def oracle_values(codec: str, code: reference.Code, target, affine=None) -> np.ndarray:
    if codec == "rotated":
        return reference.decode_rotated(code, target, BITS[codec], KEY, affine)
    return reference.decode_minmax(code, target, BITS[codec], affine)


def same_bytes(found, expected) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def make_affine(cases, channels: int, inner: int) -> reference.Affine:
    return reference.Affine(cases.gaussian(channels, 5), cases.gaussian(channels, 6), inner)


CUTS = (0, 1, 3, 10, 11, 17, 20)
CUT_COUNT = 19 * 256 + 100


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_blocks_are_decoded_into_and_onto_an_existing_buffer(
    cases, instruction_set, codec, element_type
) -> None:
    source = cases.as_type(cases.broken(CUT_COUNT), element_type)
    code, affine = oracle_code(codec, source), make_affine(cases, 7, 49)
    coded = Coded(codec, code, CUT_COUNT)
    mask = reference.encode_mask(source, Predicate.ABOVE, 0.0, 0.0)
    old = cases.as_type(cases.smooth(CUT_COUNT, 9), element_type)
    for onto in (None, old):
        for chosen in (None, mask):
            for after in (None, affine):
                target = reference.Target(CUT_COUNT, element_type, onto, chosen)
                whole = oracle_values(codec, code, target, after)
                for first, last in pairwise(CUTS):
                    part = slice(256 * first, 256 * last)
                    room = cases.guarded(len(whole[part]), whole.dtype).fill(old[part])
                    coded.decode(
                        *(room.address, element_type),
                        affine=after,
                        mask=chosen,
                        accumulate=onto is not None,
                        blocks=(first, last),
                    )
                    same_bytes(room.opened(), whole[part])


def test_a_part_of_a_large_tensor_on_many_threads(cases, instruction_set) -> None:
    """Large enough for more than one thread, and for results that bypass the caches."""
    source, blocks = cases.smooth(3_000_000), block_count(3_000_000)
    for codec in CODECS:
        code = oracle_code(codec, source)
        whole = oracle_values(codec, code, reference.Target(len(source)))
        for threads in (1, 4):
            back = np.full(len(source) - 777 * 256, 7, np.float32)
            coded = Coded(codec, code, len(source), threads)
            coded.decode(back.ctypes.data, blocks=(777, blocks))
            same_bytes(back, whole[777 * 256 :])


@pytest.mark.parametrize("codec", CODECS)
def test_no_blocks_are_no_work(cases, instruction_set, codec) -> None:
    source, back = cases.smooth(CUT_COUNT), np.zeros(1, np.float32)
    Coded(codec, oracle_code(codec, source), CUT_COUNT).decode(back.ctypes.data, blocks=(5, 5))
    assert back[0] == 0


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("blocks", [(-1, 1), (1, 0), (0, 3), (3, 3)])
def test_bad_block_ranges_are_refused(cases, codec, blocks) -> None:
    room = np.zeros(512, np.float32)
    coded = Coded(codec, oracle_code(codec, room), 512)
    with pytest.raises(KernelError, match="the tensor has 2"):
        coded.decode(room.ctypes.data, blocks=blocks)
