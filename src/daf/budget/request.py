"""Budgets as users write them: bytes, a fraction of the device, ``"auto"``, or a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from daf.core.errors import UnitError
from daf.core.units import parse_bytes

BudgetValue = str | int | float | None
Budget = BudgetValue | Callable[[], BudgetValue]

AUTO = "auto"
Scope = Literal["process", "tree"]  # whose bytes a budget bounds: with "tree", children's too


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed budget: bytes, a fraction, or neither (``"auto"``)."""

    nbytes: int | None = None
    fraction: float | None = None

    @property
    def is_auto(self) -> bool:
        """True if it is whatever the machine can spare."""
        return self.nbytes is None and self.fraction is None


def parse_budget(value: BudgetValue) -> Request | None:
    """Parse bytes (``"700MB"`` or an int), a fraction or ``"auto"``; None (no budget) stays None.

    A fraction of the device's memory is a float in (0, 1], ``"0.5"`` or ``"50%"``. Else: UnitError.
    """
    if value is None:
        return None
    if isinstance(value, float):
        return Request(fraction=_checked_fraction(value, value))
    if isinstance(value, str):
        text = value.strip().lower()
        if text == AUTO:
            return Request()
        if (fraction := _fraction_in(text)) is not None:
            return Request(fraction=_checked_fraction(fraction, value))
    return Request(nbytes=parse_bytes(value))


def _fraction_in(text: str) -> float | None:
    """Return the number of ``"50%"`` or ``"0.5"``; byte counts have no decimal point, so None."""
    number = text.removesuffix("%")
    if number == text and "." not in text:
        return None
    try:
        return float(number) / (1 if number == text else 100)
    except ValueError:
        return None  # a unit follows: bytes


def _checked_fraction(fraction: float, value: BudgetValue) -> float:
    if not 0 < fraction <= 1:
        raise UnitError(
            f"asked for {value!r} as a fraction of the device's memory; give one above 0 and at "
            "most 1, such as 0.5 or '50%', or bytes such as '512MB'"
        )
    return fraction
