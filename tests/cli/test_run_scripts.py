"""``daf run`` on scripts that are written as public examples are, with no line for DAF in them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from daf.memory import process_memory

SCRIPTS = [
    pytest.param(each, id=each.stem)
    for each in sorted((Path(__file__).parent / "scripts").glob("*.py"))
]
SHARE = 0.6  # of plain's peak above the floor
FIRST_LOSSES = 3

needs_peak = pytest.mark.skipif(
    not process_memory.peak_is_exact(), reason="this system keeps no resettable high-water mark"
)

# The floor is what a process holds that has imported PyTorch and made an optimizer.
PLAIN = """
import json, runpy, sys, torch
from daf.memory import process_memory
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
floor = process_memory.resident_bytes()
process_memory.reset_peak()
sys.argv = sys.argv[1:]
try: runpy.run_path(sys.argv[0], run_name="__main__")
finally: print(json.dumps([floor, process_memory.peak_bytes()]), file=sys.stderr)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=300
    )


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    lines = (line.split() for line in done.stdout.splitlines())
    return [float(words[1]) for words in lines if words and words[0] == "loss"]


def budgeted(script: Path, budget_bytes: int, report: Path) -> subprocess.CompletedProcess[str]:
    asked = ("--budget", str(budget_bytes), "--tolerance", "0", "--report", str(report))
    return run("-m", "daf", "run", *asked, str(script))


@needs_peak
@pytest.mark.thorough
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_as_plain_within_its_budget_or_names_one(
    script: Path, tmp_path: Path
) -> None:
    plain = run("-c", PLAIN, str(script))
    assert plain.returncode == 0, plain.stderr[-2000:]
    floor, peak = json.loads(plain.stderr.strip().splitlines()[-1])
    budget = int(floor + SHARE * (peak - floor))
    ours = budgeted(script, budget, tmp_path / "report.json")
    if ours.returncode:
        assert "try budget=" in ours.stderr, ours.stderr[-2000:]
        budget = int(ours.stderr.rpartition("try budget=")[2].split(",")[0])
        ours = budgeted(script, budget, tmp_path / "report.json")
    assert ours.returncode == 0, ours.stderr[-2000:]
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert found["models"]
    assert found["peak_bytes"] <= budget
    expected = losses_of(plain)[:FIRST_LOSSES]
    assert len(expected) == FIRST_LOSSES
    assert losses_of(ours)[:FIRST_LOSSES] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_script_that_trains_nothing_says_so_and_keeps_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            print(sys.argv[1:], __name__, sys.path[0])
            sys.exit(7)
        """)
    )
    done = run("-m", "daf", "run", "--budget", "2GB", str(script), "--epochs", "3")
    assert done.returncode == 7
    assert done.stdout.strip() == f"['--epochs', '3'] __main__ {tmp_path}"
    assert "trained no model" in done.stderr
