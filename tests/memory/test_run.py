from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daf.cli import app
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


def test_a_program_runs_as_itself_its_memory_is_told_and_its_history_kept(tmp_path: Path) -> None:
    program, history = tmp_path / "program.py", tmp_path / "history.pickle"
    program.write_text(PROGRAM)
    done = daf_run("--json", "--history", str(history), str(program), "one", "--two")
    assert done.returncode == 3
    assert done.stdout == "__main__ ['one', '--two']\n"
    counts = json.loads(done.stderr.splitlines()[-1])
    assert counts["live_bytes.peak"] == 2**23
    assert (counts["allocations"], counts["hits"]) == (5, 4)
    (trace,) = pickle.loads(history.read_bytes())["device_traces"]
    large = [event for event in trace if event["size"] >= 2**20]
    assert [event["action"] for event in large] == ["alloc", "free_requested", "free_completed"] * 5
    assert {event["size"] for event in large} == {2**23}
    assert {event["frames"][0]["name"].split(".")[1] for event in large} == {"ones"}


def test_a_limit_ends_the_program_with_pytorch_s_own_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = daf_run("--limit", "4MiB", str(program))
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(tmp_path / "nowhere.py")])
    assert done.exit_code == 2
    assert "nowhere.py" in done.stderr


def test_a_history_that_cannot_be_written_is_reported_and_the_program_s_status_kept(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = daf_run("--history", str(tmp_path / "no" / "history.pickle"), str(program))
    assert done.returncode == 3
    assert "the history was not written" in done.stderr
