"""What the account sees of libraries' memory is inside, and the rest is not hidden."""

from __future__ import annotations

import pytest
from daf_bench.memory import outside
from thoroughness import ALL

from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason

MB = outside.MB
SIZE = 20 * MB
NAMES = ("arrays", "grow", "short", "decode", "bytes")
PROBLEM = unsupported_reason()
LONG = pytest.mark.thorough

pytestmark = [
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
    pytest.mark.skipif(not process_memory.peak_is_exact(), reason="no resettable high-water mark"),
]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    patch = pytest.MonkeyPatch()
    names = NAMES if ALL else ("arrays", "bytes")
    patch.setattr(outside, "CASES", {name: outside.CASES[name] for name in names})
    result = outside.run(SIZE)
    patch.undo()
    assert result.figures["cases_tried"] == len(names)
    assert result.figures["outside_share_of_arrays"] < 0.1
    return {row["case"]: row for row in result.rows}


@pytest.mark.parametrize("name", ["arrays", pytest.param("grow", marks=LONG)])
def test_arrays_are_inside(rows: dict[str, dict[str, float]], name: str) -> None:
    assert rows[name]["account_peak_bytes"] >= 0.95 * SIZE
    assert rows[name]["outside_peak_bytes"] < MB
    assert rows[name]["outside_kept_bytes"] < MB


@pytest.mark.parametrize(
    "name", [pytest.param("short", marks=LONG), pytest.param("decode", marks=LONG), "bytes"]
)
def test_what_others_take_is_outside(rows: dict[str, dict[str, float]], name: str) -> None:
    assert rows[name]["account_peak_bytes"] < MB
    assert rows[name]["outside_peak_bytes"] >= 0.95 * SIZE
    assert rows[name]["outside_kept_bytes"] >= 0.95 * SIZE


def test_a_library_that_is_missing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"arrays": outside.CASES["arrays"], "none": outside.Case("", "no-such-library", bytes)}
    monkeypatch.setattr(outside, "CASES", cases)
    result = outside.run(2 * MB)
    assert result.figures["cases_missing"] == 1
    assert result.rows[1]["version"] is None
    assert "peak_bytes" not in result.rows[1]
