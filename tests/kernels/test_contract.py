"""Calls outside the contract are refused with a KernelError, never answered with a crash."""

from __future__ import annotations

import numpy as np
import pytest

from daf.core import code_tables
from daf.core.code_format import ElementType, Predicate
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine
from daf.kernels.cpu import flat

ROOM = np.zeros(4096, np.float32)
AT = ROOM.ctypes.data
F32 = ElementType.FLOAT32
GOOD = {
    "encode_rotated": (AT, F32, 256, 2, 1, 0, AT, AT, 1),
    "decode_rotated": (AT, AT, 256, 2, 2, 1, 0, AT, F32, 1),
    "encode_minmax": (AT, F32, 256, 2, 0, AT, AT, 1),
    "decode_minmax": (AT, AT, 256, 2, AT, F32, 1),
    "encode_steps": (AT, F32, 256, 2, 0, AT, 1),
    "decode_steps": (AT, 256, 2, AT, F32, 1),
    "encode_mask": (AT, F32, 256, Predicate.ABOVE, 0.0, 0.0, AT, 1),
    "decode_mask": (AT, 256, 0.0, 1.0, AT, F32, 1),
    "encode_derivative": (AT, F32, 256, 1, AT, AT, 1),
    "decode_derivative": (AT, 256, 1, AT, AT, F32, 1),
    "encode_integers": (AT, 4, 256, 32, 0, AT, 1),
    "decode_integers": (AT, 256, 3, 0, AT, 4, 1),
    "copy": (AT, AT + 8192, 1024, 1),
}
BAD = [
    *[("encode_rotated", place, value) for place, value in
      ((0, 0), (1, 3), (2, -1), (3, 0), (3, 5), (4, 0), (4, 3), (5, -1), (5, 2**64), (6, 0),
       (7, 0), (8, 0))],
    *[("decode_rotated", place, value) for place, value in
      ((0, 0), (1, 0), (2, -1), (3, 5), (4, 0), (4, 3), (5, 3), (6, -1), (7, 0), (8, 9), (9, -1))],
    *[("encode_minmax", place, value) for place, value in
      ((0, 0), (1, -1), (2, -5), (3, 0), (3, 9), (4, 2**64), (5, 0), (6, 0), (7, 0))],
    *[("decode_minmax", place, value) for place, value in
      ((0, 0), (1, 0), (2, -1), (3, 9), (4, 0), (5, 7), (6, 0))],
    *[("encode_steps", place, value) for place, value in
      ((0, 0), (1, 3), (2, -1), (3, 0), (3, 9), (4, -1), (5, 0), (6, 0))],
    *[("decode_steps", place, value) for place, value in
      ((0, 0), (1, -1), (2, 0), (2, 9), (3, 0), (4, 4), (5, 0))],
    *[("encode_mask", place, value) for place, value in
      ((0, 0), (1, 5), (2, -1), (3, 2), (6, 0), (7, 0))],
    *[("decode_mask", place, value) for place, value in ((0, 0), (1, -1), (4, 0), (5, 4), (6, 0))],
    *[("encode_derivative", place, value) for place, value in
      ((0, 0), (1, 3), (2, -1), (3, 0), (3, 2), (3, 9), (4, 0), (5, 0), (6, 0))],
    *[("decode_derivative", place, value) for place, value in
      ((0, 0), (1, -1), (2, 0), (2, 9), (3, 0), (4, 0), (5, 3), (6, 0))],
    *[("encode_integers", place, value) for place, value in
      ((0, 0), (1, 3), (2, -1), (3, 0), (3, 65), (5, 0), (6, 0))],
    *[("decode_integers", place, value) for place, value in
      ((0, 0), (1, -1), (2, 0), (2, 65), (4, 0), (5, 16), (6, 0))],
    *[("copy", place, value) for place, value in ((0, 0), (1, 0), (2, -1), (3, 0))],
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_the_good_calls_are_good(name) -> None:
    getattr(flat, name)(*GOOD[name])


@pytest.mark.parametrize(("name", "place", "value"), BAD)
def test_bad_calls_are_refused(name, place, value) -> None:
    arguments = list(GOOD[name])
    arguments[place] = value
    with pytest.raises(KernelError, match="asked for"):
        getattr(flat, name)(*arguments)


@pytest.mark.parametrize(
    "affine",
    [
        ChannelAffine(0, 1, AT, AT),
        ChannelAffine(1, 0, AT, AT),
        ChannelAffine(1, 1, 0, AT),
        ChannelAffine(1, 1, AT, 0),
    ],
)
@pytest.mark.parametrize(
    "name",
    [f"{way}_{codec}" for codec in ("rotated", "minmax", "steps") for way in ("encode", "decode")],
)
def test_bad_affines_are_refused(name, affine) -> None:
    with pytest.raises(KernelError, match="asked for"):
        getattr(flat, name)(*GOOD[name], affine)


def test_unknown_instruction_sets_are_refused() -> None:
    with pytest.raises(KernelError, match="portable"), flat.use_instruction_set("abacus"):
        pass


def test_a_forced_set_ends_with_its_context() -> None:
    with pytest.raises(ZeroDivisionError), flat.use_instruction_set("portable"):
        raise ZeroDivisionError
    assert flat._forced_set.get() == ""


def test_derivative_tables_of_unknown_width_are_refused() -> None:
    with pytest.raises(KernelError, match="asked for"):
        code_tables.derivative_table(np.tanh, 5)
