from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from daf.memory.recycling_allocator import unsupported_reason

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))

PROGRAM = """
import sys, torch
for _ in range(5):
    torch.ones(2**21)
print(__name__, sys.argv[1:])
sys.exit(3)
"""


def daf_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "daf", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_program_runs_as_itself_and_its_memory_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = daf_run("--json", str(program), "one", "--", "--two")
    assert done.returncode == 3
    assert done.stdout == "__main__ ['one', '--two']\n"
    counts = json.loads(done.stderr.splitlines()[-1])
    assert counts["live_bytes.peak"] == 2**23
    assert (counts["allocations"], counts["hits"]) == (5, 4)


def test_a_limit_ends_the_program_with_pytorch_s_own_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = daf_run("--limit", "4MiB", str(program))
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    done = daf_run(str(tmp_path / "nowhere.py"))
    assert done.returncode == 2
    assert "nowhere.py" in done.stderr


def test_the_history_is_kept_and_drawn(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    history = tmp_path / "history.jsonl"
    assert daf_run("--history", str(history), str(program)).returncode == 3
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    large = [line for line in lines if abs(line["bytes"]) >= 2**20]
    assert [line["bytes"] for line in large] == [2**23, -(2**23)] * 5
    assert {line["operator"].split(".")[1] for line in large} == {"ones"}
    assert history.with_suffix(".png").stat().st_size > 10_000


def test_a_history_that_would_be_its_own_picture_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = daf_run("--history", str(tmp_path / "history.png"), str(program))
    assert (done.returncode, done.stdout) == (2, "")
    assert ".jsonl" in done.stderr
