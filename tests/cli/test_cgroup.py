"""Inside a memory cgroup of the budget's size the job finishes, and plain PyTorch is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from daf_bench.harness import cgroup

WORKS, REASON = cgroup.can_limit()

# Little to compute, and some 300 MB of tensors to save at a batch of 256.
WIDE_MODEL = """
from torch import nn

def wide(classes):
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(32, 32, 1), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))
"""


def train(model: str, batch_size: int, budget: int | None, out: Path) -> list[str]:
    command = [sys.executable, "-m", "daf", "train", model, "digits", "--json", "--max-steps", "2"]
    asked = "none" if budget is None else str(budget)
    return [*command, "--batch-size", str(batch_size), "--budget", asked, "--out", str(out)]


def finishes_where_plain_is_killed(
    model: str, batch_size: int, budget_bytes: int, folder: Path
) -> dict[str, int]:
    """The summary of the run within the budget."""
    with cgroup.limited_group(budget_bytes) as group:
        ours = group.run(train(model, batch_size, budget_bytes, folder / "ours"))
        plain = group.run(train(model, batch_size, None, folder / "plain"))
    assert ours.returncode == 0, ours.stderr
    assert plain.returncode == cgroup.KILLED_BY_SYSTEM
    summary: dict[str, int] = json.loads(ours.stdout)
    assert summary["peak_bytes"] <= budget_bytes
    return summary


@pytest.mark.skipif(not WORKS, reason=REASON)
def test_the_budget_holds_where_plain_pytorch_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide_model.py").write_text(WIDE_MODEL)
    monkeypatch.chdir(tmp_path)
    finishes_where_plain_is_killed("wide_model:wide", 256, 400_000_000, tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(not WORKS, reason=REASON)
def test_resnet18_keeps_as_much_as_the_budget_allows(tmp_path: Path) -> None:
    summary = finishes_where_plain_is_killed("resnet18", 96, 640_000_000, tmp_path)
    assert summary["saved_bytes_peak"] < summary["saved_bytes_plain"] / 2
