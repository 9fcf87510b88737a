"""Planes given up in mid-step raise the gradient's error by as much as their number foretells."""

from __future__ import annotations

import pytest
from daf_bench.pool.eviction_error import gradient_row

from daf.core.code_tables import rotated_error


def test_the_error_is_as_the_planes_lost_foretell() -> None:
    row = gradient_row(4)
    assert row["measured_over_predicted"] == pytest.approx(1, rel=0.06)
    # Half the pool is more than half the planes: some layers are left with a single one.
    assert 3 < row["predicted_growth"] <= rotated_error(4, 1) / rotated_error(4, 4)
