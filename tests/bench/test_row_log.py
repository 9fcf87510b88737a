"""A long measurement goes on where it stopped, and never mixes with another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from daf_bench.harness.row_log import RowLog

from daf.core.errors import RunFolderError


def test_rows_are_measured_once_and_found_again(tmp_path: Path) -> None:
    path, measured = tmp_path / "rows.jsonl", []

    def make(value: int) -> dict[str, int]:
        measured.append(value)
        return {"value": value}

    first = RowLog(path, {"steps": 3, "names": ("a", "b")})
    assert first.row("one", lambda: make(1)) == {"value": 1}
    assert first.row("one", lambda: make(2)) == {"value": 1}
    again = RowLog(path, {"steps": 3, "names": ["a", "b"]})
    again.row("one", lambda: make(3))
    again.row("two", lambda: make(4))
    assert measured == [1, 4]
    assert RowLog(path, {"steps": 3, "names": ("a", "b")}).rows == [{"value": 1}, {"value": 4}]


def test_a_half_written_row_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    log = RowLog(path, {})
    log.row("one", lambda: {"value": 1})
    log.row("two", lambda: {"value": 2})
    path.write_text(path.read_text()[:-5])
    again = RowLog(path, {})
    assert again.rows == [{"value": 1}]
    again.row("two", lambda: {"value": 3})
    assert RowLog(path, {}).rows == [{"value": 1}, {"value": 3}]


def test_rows_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowLog(path, {"steps": 3})
    with pytest.raises(RunFolderError, match="another measurement"):
        RowLog(path, {"steps": 4})
    path.write_text("no rows at all\n")
    with pytest.raises(RunFolderError, match="another measurement"):
        RowLog(path, {"steps": 3})


def test_without_a_file_rows_are_only_kept_in_memory() -> None:
    log = RowLog(None, {})
    log.row("one", lambda: {"value": 1})
    assert log.rows == [{"value": 1}]
