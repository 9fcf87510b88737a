"""Byte counts parsed and formatted; MB is 10**6 and MiB is 2**20, everywhere."""

import math
import re

from daf.core.errors import UnitError

_MULTIPLIERS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _MULTIPLIERS |= {f"{_prefix}B": 1000**_power, f"{_prefix}IB": 1024**_power}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_DISPLAY = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def parse_bytes(text: str | int) -> int:
    """Parse a byte count; return whole bytes, rounded down. Raises UnitError for anything else.

    ``text``: an int, or a number with a unit in any case, B, KB, MB, GB, TB (powers of 1000), KiB,
    MiB, GiB or TiB (powers of 1024): ``"512MB"``, ``"1.5 GiB"``, ``700_000_000``.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise UnitError(f"asked for {text!r} bytes; give an int or a text such as '512MB'")
    if isinstance(text, int):
        return _positive(text, text)
    if (match := _PATTERN.fullmatch(text)) is None:
        raise UnitError(f"cannot read {text!r} as bytes; try '512MB' or '1.5GiB'")
    number, unit = match.groups()
    if unit.upper() not in _MULTIPLIERS:
        known = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise UnitError(f"unknown unit {unit!r} in {text!r}; known units: {known}")
    return _positive(float(number) * _MULTIPLIERS[unit.upper()], text)


def parse_optional_bytes(text: str | int | None) -> int | None:
    """Parse a byte count as ``parse_bytes`` does; None stays None."""
    return None if text is None else parse_bytes(text)


def _positive(count: float, text: str | int) -> int:
    if not math.isfinite(count) or count < 1:
        raise UnitError(f"asked for {text!r}: a byte count must be at least one byte and finite")
    return int(count)


def format_bytes(count: int) -> str:
    """Return bytes with three significant digits in powers of 1000 (``"74.3 MB"``)."""
    for name, size in _DISPLAY:
        if abs(count) >= size:
            value = count / size
            decimals = max(0, 2 - int(math.log10(abs(value))))
            return f"{value:.{decimals}f} {name}"
    return f"{count} B"


def pinned_bytes(nbytes: int) -> int:
    """Return what PyTorch's pinned allocator takes for ``nbytes``: the next power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()
