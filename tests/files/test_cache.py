"""What is kept between runs: bounded, checked, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daf.files import cache


def test_what_was_kept_is_there_until_it_is_replaced(tmp_path: Path) -> None:
    assert cache.kept(tmp_path, "one") is None
    cache.keep(tmp_path, "one", {"a": [1, 2.5, None]})
    cache.keep(tmp_path, "one", {"a": "new"})
    cache.keep(tmp_path, "two", {})
    assert cache.kept(tmp_path, "one") == {"a": "new"}
    assert cache.kept(tmp_path, "two") == {}


@pytest.mark.parametrize("damage", ["flipped", "cut", "renamed", "empty", "text"])
def test_a_damaged_file_is_told_of_and_removed(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.keep(tmp_path, "one", {"a": 12345})
    path = tmp_path / "one.json"
    content = path.read_bytes()
    damaged = {
        "flipped": content.replace(b"12345", b"12346"),
        "cut": content[:-9],
        "renamed": content,
        "empty": b"\n",
        "text": b"no JSON\n",
    }
    if damage == "renamed":
        path = path.rename(tmp_path / "two.json")
    path.write_bytes(damaged[damage])
    assert cache.kept(tmp_path, path.stem) is None
    assert f"{path} is damaged" in caplog.text
    assert not path.exists()


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    for number in range(3):
        cache.keep(tmp_path, str(number), {})
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert cache.kept(tmp_path, "0") == {}  # used now
    cache.keep(tmp_path, "3", {})
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["0", "2", "3"]
    monkeypatch.setattr(cache, "MOST_BYTES", 1)
    cache.keep(tmp_path, "4", {"a": 1})
    assert [path.stem for path in tmp_path.iterdir()] == ["4"]


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.keep(tmp_path / "missing", "one", {})
    assert "one is not kept" in caplog.text
    assert cache.kept(tmp_path / "missing", "one") is None


def test_the_folder_is_the_one_named_or_the_user_s_and_none_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAF_CACHE", str(tmp_path / "here"))
    assert cache.cache_folder("starts") == tmp_path / "here" / "starts"
    monkeypatch.delenv("DAF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    monkeypatch.setattr(cache.sys, "platform", "linux")
    assert cache.cache_folder() == tmp_path / "users" / "daf"
    (tmp_path / "file").write_text("")
    for nowhere in (str(tmp_path / "file" / "below"), ""):
        monkeypatch.setenv("DAF_CACHE", nowhere)
        assert cache.cache_folder() is None
