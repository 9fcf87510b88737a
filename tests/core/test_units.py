"""Bytes in and out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf.core.errors import DafError, UnitError
from daf.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MB", 512_000_000),
        ("1.5GiB", 1_610_612_736),
        ("700 mb", 700_000_000),
        ("64KiB", 65_536),
        ("12", 12),
        ("1e3 B", 1000),
        (".5kB", 500),
        (4096, 4096),
    ],
)
def test_known_texts(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("512XB", "unknown unit 'XB'"),
        ("many", "cannot read 'many'"),
        ("", "cannot read ''"),
        ("-5MB", "cannot read '-5MB'"),
        ("0MB", "at least one byte"),
        (0, "at least one byte"),
        (-1, "at least one byte"),
        ("1e999MB", "finite"),
        (True, "give an int or a text"),
        (1.5, "give an int or a text"),
    ],
)
def test_bad_texts_say_what_was_found(text: str | int, told: str) -> None:
    with pytest.raises(UnitError, match=told) as caught:
        parse_bytes(text)
    assert isinstance(caught.value, DafError)
    assert isinstance(caught.value, ValueError)


@given(st.integers(min_value=1, max_value=10**15))
def test_written_bytes_read_back_within_half_a_percent(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.006 * count


def test_three_digits() -> None:
    assert format_bytes(74_300_000) == "74.3 MB"
    assert format_bytes(999) == "999 B"
    assert format_bytes(1_000) == "1.00 kB"
