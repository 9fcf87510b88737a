"""Inside a memory cgroup of the budget's size the job finishes, and plain PyTorch is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from daf_bench.harness import cgroup

WORKS, REASON = cgroup.can_limit()
BUDGET_BYTES = 640_000_000


def train(budget: str, out: Path) -> list[str]:
    command = [sys.executable, "-m", "daf", "train", "resnet18", "digits", "--json"]
    return [*command, "--batch-size", "96", "--max-steps", "2", "--budget", budget, "--out", out]


@pytest.mark.thorough
@pytest.mark.skipif(not WORKS, reason=REASON)
def test_the_budget_holds_where_plain_pytorch_is_killed(tmp_path: Path) -> None:
    with cgroup.limited_group(BUDGET_BYTES) as group:
        ours = group.run(train(str(BUDGET_BYTES), tmp_path / "ours"))
        plain = group.run(train("none", tmp_path / "plain"))
    assert ours.returncode == 0, ours.stderr
    summary = json.loads(ours.stdout)
    assert summary["peak_bytes"] <= BUDGET_BYTES
    # As much is kept as the budget allows, since that is fastest.
    assert summary["saved_bytes_peak"] < summary["saved_bytes_plain"] / 2
    assert plain.returncode == cgroup.KILLED_BY_SYSTEM
