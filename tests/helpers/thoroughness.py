"""How much of a check runs: all of it with ``scripts/test --all``, less for every change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

ALL = os.environ.get("DAF_TESTS") == "all"


def at_most(of_all: int, per_change: int) -> int:
    """``of_all`` examples or operations with ``--all``, else ``per_change``."""
    return of_all if ALL else per_change


def pairs(kinds: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """All pairs with ``--all``; for every change all kinds of the first type, all types of the
    last kind."""
    return [
        pytest.param(
            *(kind, each),
            marks=() if each == types[0] or kind == kinds[-1] else pytest.mark.thorough,
            id=f"{kind}-{each}",
        )
        for kind in kinds
        for each in types
    ]
