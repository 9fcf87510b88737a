"""The estimate of a squared bias has none of its own, and the networks are coded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from daf_bench.bias import run
from daf_bench.bias.networks import ACTIVATIONS, NETWORKS, OUTLIERS, outlier_networks
from daf_bench.cli import app
from typer.testing import CliRunner


@pytest.mark.parametrize("bias", [0.0, 0.05])
def test_the_estimate_is_unbiased(bias: float) -> None:
    """Averaged over many estimates from four gradients each; the mean alone would be far off."""
    torch.manual_seed(0)
    plain = torch.ones(64)
    found = [
        run.errors_of((plain + bias + 0.5 * torch.randn(64) for _ in range(4)), plain)
        for _ in range(2000)
    ]
    mean = sum(each.bias for each in found) / len(found)
    assert mean == pytest.approx(bias**2, abs=0.0006)
    noise = sum(each.noise for each in found) / len(found)
    assert noise == pytest.approx(bias**2 + 0.25, rel=0.01)


def test_enough_networks_of_every_kind() -> None:
    assert len(NETWORKS) >= 30
    assert set(ACTIVATIONS) | set(outlier_networks()) < set(NETWORKS)
    assert len(outlier_networks()) == 6 * len(OUTLIERS)


@pytest.mark.thorough
def test_every_network_is_coded(tmp_path: Path) -> None:
    job = run.BiasJob(widths=(2,), seeds=2)
    result = run.run(job, tmp_path / "rows.jsonl")
    assert result.figures["networks"] == len(NETWORKS)
    for row in result.rows:
        assert row["2"]["coded"] > 0, row["network"]
        assert row["2"]["noise"] > 0, row["network"]


def test_biases_that_were_are_gone() -> None:
    """Of a one-hot row the squared bias was 0.046 with one round, of a GELU in steps 0.005."""
    job = run.BiasJob(("one_hot", "gelu", "layer_norm_1e3"), (2,), seeds=12)
    figures = run.run(job).figures
    assert figures["bias_2bit_worst"] < 0.002
    assert figures["bias_outliers_worst"] < 0.002
    assert 0.1 < figures["noise_2bit_median"] < 0.4


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "bias.json"
    done = CliRunner().invoke(app, ["bias", "--quick", "--only", "top_8", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [row["network"] for row in found["rows"]] == ["top_8"]
    assert found["figures"]["networks"] == 1
    wrong = CliRunner().invoke(app, ["bias", "--only", "none"])
    assert wrong.exit_code != 0
