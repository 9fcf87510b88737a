"""Each operator runs as what it is called, bytes are counted exactly, figures follow from rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import render
import torch
import torch.nn.functional as F
from daf_bench.cli import app
from daf_bench.operators import speed
from daf_bench.operators.cases import full_cases, image_cases, text_cases
from daf_bench.operators.memory_traffic import counting
from torch import nn
from typer.testing import CliRunner

from daf.capture.compress import compress
from daf.kernels.cpu import codecs
from daf.kernels.cpu.backend import CpuBackend
from daf.kernels.normalisation import Geometry, RunningStatistics, Sums
from daf.operators.chunked import weight_gradient

TINY = speed.SpeedJob((*image_cases(8, 16, 16), *text_cases(256, 64, 100)), rounds=2)
NAMES = {
    "batch_norm + relu": "FusedNormBackward",
    "batch_norm + add + relu": "FusedNormBackward",
    "conv2d": "ChunkedConvolutionBackward",
    "layer_norm": "FusedRowNormBackward",
    "rms_norm": "FusedRowNormBackward",
    "layer_norm + linear": "FusedRowNormBackward",
    "gelu + linear": "FusedSmoothBackward",
    "linear": "ChunkedLinearBackward",
    "attention": "ChunkedAttentionBackward",
    "linear + cross_entropy": "_SummedCrossEntropyBackward",
}


@pytest.fixture(scope="module")
def result() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_gradient, "CHUNK_BYTES", 1 << 14)
        return speed.run(TINY)


def test_figures_follow_from_the_rows(result: Any) -> None:
    ours = [row for row in result.rows if row["contestant"] == "ours"]
    plain = [row for row in result.rows if row["contestant"] == "plain"]
    assert len(ours) == len(plain) == len(TINY.cases)
    for way in ("forward", "backward", "step"):
        worst = max(row[f"{way}_ratio"] for row in ours)
        assert result.figures[f"worst_{way}_ratio"] == worst > 0
        assert all(row[f"{way}_ratio"] == 1 for row in plain)
    for way in ("forward", "backward"):
        shares = [
            one[f"{way}_bytes"] / other[f"{way}_bytes"]
            for one, other in zip(ours, plain, strict=True)
        ]
        product = torch.tensor(shares, dtype=torch.float64).log().mean().exp()
        assert result.figures[f"mean_{way}_bytes_ratio"] == pytest.approx(float(product))


@pytest.mark.parametrize("case", TINY.cases, ids=lambda case: f"{case.name} {case.shape[1]}")
def test_every_operator_is_what_it_is_called_and_computes_the_same(case, monkeypatch) -> None:
    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", 1 << 14)
    group = speed.contestants_of(case, 8)
    found: dict[str, tuple[list[Any], list[torch.Tensor]]] = {}
    for each in group:
        names: list[str] = []

        def note(way: str, call: Any, names: list[str] = names) -> Any:
            end = call()
            if way == "forward":
                names[:] = node_names(end.grad_fn)
            return end

        for _ in range(speed.WARM_UP_ROUNDS):
            torch.manual_seed(4)  # the same weights are dropped
            each.run(note)
        found[each.name] = names, each.gradients()
    assert NAMES[case.name] in found["ours"][0]
    assert NAMES[case.name] not in found["plain"][0]
    for one, other in zip(found["ours"][1], found["plain"][1], strict=True):
        assert (one - other).square().sum() < 1e-3 * other.square().sum()


def node_names(root: Any) -> list[str]:
    names, todo = [], [root]
    while todo:
        node = todo.pop()
        names.append(node.name())
        todo += [below for below, _ in node.next_functions if below is not None]
    return names


def test_bytes_of_known_operators() -> None:
    x, gradient = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    norm = nn.LayerNorm(64)
    y = x * 1
    with compress(norm, 2, fused=True), counting() as forward:
        out = norm(y)
    with counting() as backward:
        out.backward(gradient)
    tensor, code = 4 * 64 * 64, 64 * 64 * 2 // 8 + 4 * 16
    vector = 4 * 64
    assert forward.nbytes == 2 * tensor + code + 2 * 2 * vector  # gamma and beta are copied
    of_vectors = 2 * (8 + 4) * 64  # float64 sums to float32
    multiplied = 2 * tensor  # the x * 1 before
    assert backward.nbytes == 2 * tensor + code + of_vectors + multiplied
    with counting() as views:
        x.detach().view(-1).t()
        torch.empty(1000)
    assert views.nbytes == 0
    with counting() as added:
        _ = x.detach() + gradient
        F.relu(gradient, inplace=True)
        _ = torch.zeros(1).expand(64, 64) + gradient
    assert added.nbytes == 3 * tensor + tensor + (4 + 4 + 2 * tensor)


@pytest.mark.parametrize("is_following", [False, True])
def test_bytes_of_channels_are_counted(is_following: bool) -> None:
    """Statistics of sums forward, factors of sums backward."""
    norm, y = nn.BatchNorm2d(64), torch.randn(8, 64, 8, 8)
    with counting() as traffic:
        statistics = CpuBackend().channel_statistics(
            y,
            Geometry(64, 64, y.numel()),
            1e-5,
            RunningStatistics(norm.running_mean, norm.running_var, 0.1) if is_following else None,
        )
    assert traffic.nbytes == 4 * y.numel() + 64 * (2 * (8 + 4) + 2 * 2 * 4 * is_following)
    sums = Sums(torch.ones(64, dtype=torch.float64), torch.ones(64, dtype=torch.float64))
    gradient = torch.empty(64)
    with counting() as traffic:
        CpuBackend().gradient_factors(
            sums,
            Geometry(64, 64, y.numel()),
            statistics.mean,
            norm.weight.detach(),
            (gradient, None),
        )
    assert traffic.nbytes == 64 * (2 * 8 + 4 * (2 + 3 + 1))  # deviation, gamma; factors; gamma's


def test_kernels_are_themselves_again_afterwards() -> None:
    before = (codecs.encode, codecs.read, codecs.copy)
    with counting():
        assert codecs.encode is not before[0]
    with pytest.raises(RuntimeError, match="shape"), counting():
        torch.zeros(3).view(2)
    assert (codecs.encode, codecs.read, codecs.copy) == before


def test_the_full_job_is_of_w1_and_bert_small() -> None:
    shapes = {(case.name, case.shape) for case in full_cases()}
    assert ("batch_norm + relu", (128, 64, 32, 32)) in shapes
    assert ("batch_norm + relu", (128, 512, 4, 4)) in shapes
    assert ("layer_norm", (8192, 512)) in shapes
    assert ("gelu + linear", (8192, 2048)) in shapes
    assert {name for name, _ in shapes} == set(NAMES)


def test_the_command_prints_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = speed.SpeedJob(text_cases(64, 64, 100)[:1], rounds=1)
    monkeypatch.setattr(speed, "quick_job", lambda: tiny)
    done = CliRunner().invoke(app, ["operators", "--speed", "--quick", "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["benchmark"] == "operator_speed"
    assert [row["contestant"] for row in printed["rows"]] == ["plain", "codes", "ours"]


def test_the_document_s_table_tells_the_rows(result: Any) -> None:
    lines = render.operator_speed_figures(json.loads(result.as_json())).splitlines()
    ours = [row for row in result.rows if row["contestant"] == "ours"]
    assert len([line for line in lines if line.startswith("| ") and "×" in line]) == len(ours)
    row = next(row for row in ours if row["operator"] == "rms_norm")
    (line,) = (line for line in lines if line.startswith("| rms_norm"))
    assert f"| {row['forward_ratio']:.2f} | {row['backward_ratio']:.2f} |" in line
