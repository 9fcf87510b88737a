"""Prices of codes follow what a coded step took as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import large

from daf.core.profile import Profile
from daf.planning.options import Allowed
from daf.planning.table import lawful, level_selection, make_table
from daf.profiling.device_speeds import HIGHEST, LOWEST, calibrated

MEASURED = large(40)
EXAMPLES = MEASURED.micro_batch_ms[-1][0]
KEPT_MS = MEASURED.forward_backward_ms(EXAMPLES)


def added_ms(profile: Profile, level: str = "1") -> float:
    table = make_table(profile, EXAMPLES, Allowed(replay=False))
    return table.cost_of(lawful(table, level_selection(table, level)))


@pytest.mark.thorough
@settings(deadline=None)
@given(st.floats(LOWEST, HIGHEST))
def test_the_coded_step_comes_out_as_measured(factor: float) -> None:
    coded_ms = KEPT_MS + factor * added_ms(MEASURED)
    found = calibrated(MEASURED, EXAMPLES, coded_ms)
    assert KEPT_MS + added_ms(found) == pytest.approx(coded_ms)
    # Other levels follow, and what is not coding stays as it was.
    assert added_ms(found, "8") == pytest.approx(factor * added_ms(MEASURED, "8"))
    assert found.speeds.copy == MEASURED.speeds.copy
    assert found.micro_batch_ms == MEASURED.micro_batch_ms


@pytest.mark.parametrize(("coded_ms", "factor"), [(0.0, LOWEST), (1e9, HIGHEST)])
def test_a_disturbed_measurement_goes_only_so_far(coded_ms: float, factor: float) -> None:
    found = calibrated(MEASURED, EXAMPLES, coded_ms)
    assert added_ms(found) == pytest.approx(factor * added_ms(MEASURED))
