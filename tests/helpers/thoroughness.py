"""How much of a check runs: all of it with ``scripts/test --all``, less for every change."""

from __future__ import annotations

import os

ALL = os.environ.get("DAF_TESTS") == "all"


def at_most(of_all: int, per_change: int) -> int:
    """``of_all`` examples or operations with ``--all``, else ``per_change``."""
    return of_all if ALL else per_change
