"""``daf report`` on runs that ``daf train`` really made, resumed ones included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import MB

from daf.memory import process_memory

Daf = Callable[..., Any]
TINY = "tiny_models:classifier"


def train(daf: Daf, out: str, *more: str) -> None:
    common = ["train", TINY, "--batch-size", "32", "--threads", "1", "--out", out, "--json"]
    ran = daf(*common, *more)
    assert ran.code == 0, ran.err


def sites(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "sites.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_plan_and_the_page_shows_it(daf: Daf) -> None:
    budget = str(process_memory.resident_bytes() + 800 * MB)
    train(daf, "run", "--budget", budget, "--max-steps", "3", "--bits", "2")
    plan = json.loads(Path("run/plan.json").read_text())
    summary = json.loads(Path("run/summary.json").read_text())
    assert plan["policy"] == summary["policy"] == "2-bit"
    account = dict(plan["account"])
    assert account.pop("predicted_peak") == sum(account.values())
    assert account["floor"] == summary["floor_bytes"]
    moments = plan["saved_by_moment"]
    assert max(moments["plain"]) == pytest.approx(summary["saved_bytes_plain"], rel=0.02)
    assert max(moments["held"]) < max(moments["plain"]) / 2
    assert 0 < plan["forward_moments"] < len(moments["held"]) == len(moments["again"])
    rows = sites("run")
    assert {"mask", "keep"} <= {row["method"] for row in rows}
    assert sum(row["held_bytes"] for row in rows) < sum(row["plain_bytes"] for row in rows)

    ran = daf("report", "run", "--png", "run/report.png")
    assert ran.code == 0, ran.err
    page = Path("run/report.html").read_text()
    assert page.count('role="listitem"') == len(rows)
    assert f"{len(rows)} saved tensors" in page
    assert plan["reason"] in page
    assert Path("run/report.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_tells_its_own_last_step_and_one_with_nothing_left_to_do_tells_nothing_new(
    daf: Daf,
) -> None:
    train(daf, "run", "--budget", "none", "--bits", "2", "--max-steps", "2")
    first = sites("run")
    ran = daf("train", "--resume", "--out", "run", "--max-steps", "2", "--json")
    assert ran.code == 0, ran.err
    assert sites("run") == first  # no step was made, so none is told
    Path("run/sites.jsonl").unlink()
    ran = daf("train", "--resume", "--out", "run", "--max-steps", "3", "--json")
    assert ran.code == 0, ran.err
    assert [row["site"] for row in sites("run")] == [row["site"] for row in first]
    assert json.loads(Path("run/plan.json").read_text())["account"] is None


def test_two_runs_are_told_apart(daf: Daf) -> None:
    train(daf, "a", "--budget", "none", "--max-steps", "2")
    train(daf, "b", "--budget", "none", "--bits", "1", "--max-steps", "2")
    ran = daf("report", "a", "b", "--html", "both.html")
    assert ran.code == 0, ran.err
    assert "runs side by side" in ran.out
    assert "b peaked at" in Path("both.html").read_text()


def test_the_page_is_not_written_through_a_link(daf: Daf, workplace: Path) -> None:
    train(daf, "run", "--budget", "none", "--max-steps", "1")
    (workplace / "victim").write_text("precious")
    for name in ("report.html", "report.png"):
        (workplace / "run" / name).symlink_to(workplace / "victim")
    assert daf("report", "run", "--png", "run/report.png").code == 0
    assert (workplace / "victim").read_text() == "precious"
    assert (workplace / "run" / "report.html").read_text().startswith("<!doctype html>")


def test_a_folder_without_a_run_is_refused(daf: Daf) -> None:
    ran = daf("report", ".")
    assert ran.code == 2
    assert "holds no run: neither summary.json" in ran.err
