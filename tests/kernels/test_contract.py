"""Calls outside the contract are refused with a KernelError, never answered with a crash."""

from __future__ import annotations

import native_calls
import numpy as np
import pytest

from daf.core import code_tables
from daf.core.code_format import ElementType, Predicate
from daf.core.errors import KernelError
from daf.kernels import PageFields
from daf.kernels.cpu import instruction_sets as sets

ROOM = np.zeros(4096, np.float32)
AT = ROOM.ctypes.data
LINES = np.arange(47, dtype=np.float32)
F32 = ElementType.FLOAT32
TWO, ONE = PageFields.flat(AT, 256, 2), PageFields.flat(AT, 256, 1)
WIDE, THREE = PageFields.flat(AT, 256, 32), PageFields.flat(AT, 256, 3)
GOOD = {
    "encode_rotated": (AT, F32, TWO, 0, 1),
    "decode_rotated": (TWO, 0, AT, F32, 1),
    "encode_minmax": (AT, F32, TWO, 0, 1),
    "decode_minmax": (TWO, AT, F32, 1),
    "encode_steps": (AT, F32, TWO, 0, 1),
    "decode_steps": (TWO, AT, F32, 1),
    "encode_mask": (AT, F32, ONE, Predicate.ABOVE, 0.0, 0.0, 1),
    "decode_mask": (ONE, 0.0, 1.0, AT, F32, 1),
    "encode_derivative": (AT, F32, ONE, LINES.ctypes.data, 0, 1),
    "decode_derivative": (ONE, AT, AT, F32, 1),
    "encode_integers": (AT, 4, WIDE, 0, 1),
    "decode_integers": (THREE, 0, AT, 4, 1),
}
BAD = [
    *[("encode_rotated", place, value) for place, value in
      ((0, 0), (1, 3), (3, -1), (3, 2**64), (4, 0))],
    *[("decode_rotated", place, value) for place, value in
      ((1, -1), (2, 0), (3, 9), (4, -1))],
    *[("encode_minmax", place, value) for place, value in ((0, 0), (1, -1), (3, 2**64), (4, 0))],
    *[("decode_minmax", place, value) for place, value in ((1, 0), (2, 7), (3, 0))],
    *[("encode_steps", place, value) for place, value in ((0, 0), (1, 3), (3, -1), (4, 0))],
    *[("decode_steps", place, value) for place, value in ((1, 0), (2, 4), (3, 0))],
    *[("encode_mask", place, value) for place, value in ((0, 0), (1, 5), (3, 2), (6, 0))],
    *[("decode_mask", place, value) for place, value in ((3, 0), (4, 4), (5, 0))],
    *[("encode_derivative", place, value) for place, value in
      ((0, 0), (1, 3), (3, 0), (4, -1), (5, 0))],
    *[("decode_derivative", place, value) for place, value in ((1, 0), (2, 0), (3, 3), (4, 0))],
    *[("encode_integers", place, value) for place, value in ((0, 0), (1, 3), (4, 0))],
    *[("decode_integers", place, value) for place, value in ((2, 0), (3, 16), (4, 0))],
]  # fmt: skip
BAD_FIELDS = ({"region": 0}, {"table": 0}, {"elements": -1}, {"kept": 0}, {"bits": 0, "kept": 0})
WIDTHS = {"rotated": 4, "minmax": 8, "steps": 8, "mask": 1, "derivative": 8, "integers": 64}


@pytest.mark.parametrize("name", GOOD)
def test_the_good_calls_are_good(name) -> None:
    getattr(native_calls, name)(*GOOD[name])


@pytest.mark.parametrize(("name", "place", "value"), BAD)
def test_bad_calls_are_refused(name, place, value) -> None:
    arguments = list(GOOD[name])
    arguments[place] = value
    with pytest.raises(KernelError, match="asked for"):
        getattr(native_calls, name)(*arguments)


def with_fields(name: str, **other: int) -> list[object]:
    """The good arguments of a call, but for some of the pages' fields."""
    return [one._replace(**other) if isinstance(one, PageFields) else one for one in GOOD[name]]


@pytest.mark.parametrize("other", BAD_FIELDS)
@pytest.mark.parametrize("name", GOOD)
def test_bad_pages_are_refused(name, other) -> None:
    with pytest.raises(KernelError, match="asked"):
        getattr(native_calls, name)(*with_fields(name, **other))


@pytest.mark.parametrize("name", GOOD)
def test_codes_too_wide_are_refused(name) -> None:
    bits = WIDTHS[name.partition("_")[2]] + 1
    with pytest.raises(KernelError, match="asked for bits"):
        getattr(native_calls, name)(*with_fields(name, bits=bits, kept=bits))


@pytest.mark.parametrize(
    "affine",
    [
        native_calls.vectors(0, 1, AT, AT),
        native_calls.vectors(1, 0, AT, AT),
        native_calls.vectors(1, 1, 0, AT),
        native_calls.vectors(1, 1, AT, 0),
    ],
)
@pytest.mark.parametrize(
    "name",
    [f"{way}_{codec}" for codec in ("rotated", "minmax", "steps") for way in ("encode", "decode")],
)
def test_bad_affines_are_refused(name, affine) -> None:
    with pytest.raises(KernelError, match="asked for"):
        getattr(native_calls, name)(*GOOD[name], affine)


def test_unknown_instruction_sets_are_refused() -> None:
    with pytest.raises(KernelError, match="portable"), sets.use_instruction_set("abacus"):
        pass


def test_a_forced_set_ends_with_its_context() -> None:
    with pytest.raises(ZeroDivisionError), sets.use_instruction_set("portable"):
        raise ZeroDivisionError
    assert sets._forced_set.get() == ""


def test_lines_of_too_few_places_are_refused() -> None:
    with pytest.raises(KernelError, match="asked for"):
        code_tables.derivative_lines(np.arange(15.0), np.arange(15.0))
