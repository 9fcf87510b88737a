"""One measurement of the noise that codes add."""

from __future__ import annotations

import json
import math

import pytest

from daf.session.noise_controller import NoiseRecord, Response


def test_a_record_is_a_line_of_json() -> None:
    found = NoiseRecord(3, 1.0, 1.0, 0.1, Response.NO_ROOM, 0.001, 0.002)
    assert json.loads(json.dumps(found.as_dict())) == {
        "step": 3,
        "added_variance": 1.0,
        "batch_variance": 1.0,
        "tolerance": 0.1,
        "response": "no room",
        "squared_bias": 0.001,
        "squared_bias_error": 0.002,
        "relative_noise": 1.0,
    }


@pytest.mark.parametrize(
    ("added", "own", "exceeds"),
    [
        (4.0, 8.0, False),
        (4.1, 8.0, True),
        (0.1, 0.0, True),
        (0.0, 0.0, False),
        (math.nan, 1.0, True),
    ],
)
def test_it_exceeds_above_the_tolerance_and_where_it_is_no_number(
    added: float, own: float, exceeds: bool
) -> None:
    assert NoiseRecord(0, added, own, 0.5).exceeds is exceeds
