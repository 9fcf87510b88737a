"""Every lever is really on, what it takes off is told, and figures follow from the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from daf_bench.harness.ablation_loop import LEVERS, LeveredLoop, lever_policy
from daf_bench.harness.worker import Entry, Step
from daf_bench.models.resnet_cifar import resnet20
from daf_bench.operators import run
from daf_bench.operators.plot import draw_waterfall, peak_changes
from PIL import Image
from torch import nn

from daf.core.errors import UnknownNameError

TINY = run.OperatorsJob(
    (Entry("tiny", "resnet20", "digits", 16),),
    Entry("resnet20", "resnet20", "digits", 8),
    groups=2,
    steps=2,
    format_steps=1,
    stage_steps=2,
    loss_steps=2,
    loss_from_step=1,
    loss_seeds=(0, 1),
)


@pytest.fixture(scope="module", params=[pytest.param("processes", marks=pytest.mark.thorough)])
def result() -> Any:
    return run.run(TINY)


def of(result: Any, part: str) -> list[dict[str, Any]]:
    return [row for row in result.rows if row["part"] == part]


def test_figures_follow_from_the_rows(result: Any) -> None:
    plain, same, ours = of(result, "compare")
    figures = result.figures
    peak = run.above_floor
    assert figures["peak_ratio"] == peak(plain) / peak(ours)
    assert figures["peak_ratio_same_allocator"] == peak(same) / peak(ours)
    assert figures["saved_ratio"] == ours["saved_bytes_plain"] / ours["saved_bytes_peak"] > 15
    assert figures["step_ratio"] > 0
    losses = of(result, "loss")
    assert [row["seed"] for row in losses] == [0, 1]
    assert figures["loss_ratio"] == pytest.approx(1, abs=0.2)
    assert figures["plain_loss_spread"] > 0


def test_every_stage_adds_its_lever(result: Any) -> None:
    rows = of(result, "waterfall")
    assert [row["stage"] for row in rows] == list(run.STAGES)
    by_stage = {row["stage"]: row for row in rows}
    assert by_stage["codes"]["saved_bytes_peak"] < by_stage["codes"]["saved_bytes_plain"] / 10
    gradients = {stage: row["gradient_bytes"] for stage, row in by_stage.items()}
    assert gradients["release"] < gradients["chunked"] == gradients["plain"] > 1e6
    buffers = sum(buffer.nbytes for buffer in resnet20().buffers())
    for row in rows:
        assert row["terms"]["parameters, buffers"] == gradients["plain"] + buffers
        assert row["terms"]["optimizer state"] == gradients["plain"]
        assert all(count >= 0 for count in row["terms"].values())
    saved = by_stage["codes"]["saved_bytes_plain"]
    assert rows[0]["terms"]["saved"] == rows[1]["terms"]["saved"] == saved


def test_the_picture_tells_all_changes(result: Any, tmp_path: Path) -> None:
    rows = of(result, "waterfall")
    changes = peak_changes(rows)
    assert [stage for stage, _, _ in changes] == list(run.STAGES[1:])
    first, last = run.above_floor(rows[0]), run.above_floor(rows[-1])
    total = sum(after - before for _, before, after in changes)
    assert total == pytest.approx((last - first) / 1e6)
    draw_waterfall(result.rows, tmp_path / "waterfall.png")
    pixels = np.asarray(Image.open(tmp_path / "waterfall.png").convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


def made_up(stage: str, peak: int, **changes: Any) -> dict[str, Any]:
    """A row of a waterfall: floor 100, parameters and optimizer state 50 each."""
    row = {"part": "waterfall", "workload": "w", "stage": stage, "floor_bytes": 100}
    row |= {"parameter_bytes": 50, "state_bytes": 50, "gradient_bytes": 50, "peak_bytes": peak}
    return row | {"saved_bytes_plain": None, "saved_bytes_peak": None} | changes


def made_up_waterfall() -> list[dict[str, Any]]:
    coded = {"saved_bytes_plain": 400, "saved_bytes_peak": 20}
    return [
        made_up("plain", 1000),
        made_up("allocator", 850, live_peak_bytes=700),
        made_up("codes", 500, live_peak_bytes=350, **coded),
        made_up("release", 510, live_peak_bytes=360, **coded),
    ]


def test_terms_add_up_to_the_peak() -> None:
    rows = run.with_terms(made_up_waterfall())
    assert [row["terms"] for row in rows] == [
        {
            "parameters, buffers": 50,
            "optimizer state": 50,
            "saved": saved,
            "transient, gradients": transient,
            "slack": slack,
        }
        for saved, transient, slack in [
            (400, 200, 200),
            (400, 200, 50),
            (20, 230, 50),
            (20, 240, 50),
        ]
    ]
    for row in rows:
        assert sum(row["terms"].values()) == run.above_floor(row)


def test_figures_of_known_bytes() -> None:
    plain, same, _, ours = made_up_waterfall()
    times = ((100.0, 120.0, 110.0), (1.0, 1.0, 1.0), (90.0, 132.0, 110.0))
    found = run.figures_of(run.Comparison([plain, same, ours], times))
    assert found == {
        "peak_ratio": 900 / 410,
        "peak_ratio_same_allocator": 750 / 410,
        "rest_ratio": 750 / 260,
        "step_ratio": 1.0,
        "saved_ratio": 20.0,
    }


class Stub:
    """A contestant process whose every group is slower and larger than the one before."""

    started = 0

    def __init__(self, entry: Entry) -> None:
        Stub.started += 1
        self.entry, self.steps = entry, list[Step]()
        # Plain of the first group, its same allocator, DAF; then the second group's.
        self._place, self._group = (Stub.started - 1) % 3, (Stub.started - 1) // 3

    def step(self) -> None:
        self.steps.append(Step(loss=1.0, step_ms=100.0 * (self._place + 1) + self._group))

    def facts(self) -> dict[str, Any]:
        return {"floor_bytes": 10 * self._group, "peak_bytes": 100 - 40 * (self._group % 2)}

    def close(self) -> None:
        pass


def test_of_several_processes_the_one_with_the_median_peak_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Above floors 100, 50 and 80: the third's; times are those of all."""
    monkeypatch.setattr("daf_bench.harness.worker.Contestant", Stub)
    monkeypatch.setattr(Stub, "started", 0)
    job = run.OperatorsJob((), None, groups=3, steps=5)
    rows, times = (found := run.compare(job, TINY.entries[0], print)).rows, found.times
    assert [row["contestant"] for row in rows] == ["plain", "plain, same allocator", "daf"]
    assert [run.above_floor(row) for row in rows] == [80, 80, 80]
    assert [row["step_ms"] for row in rows] == [101.0, 201.0, 301.0]
    assert times[0] == [100.0, 100.0, 101.0, 101.0, 102.0, 102.0]  # three of each warm up
    assert Stub.started == 9


def test_losses_are_compared_by_their_means_and_plain_s_spread() -> None:
    pairs = ((1.0, 1.1), (1.5, 1.3), (2.0, 2.1))
    rows = [{"plain_loss": plain, "daf_loss": ours} for plain, ours in pairs]
    found = run.loss_figures(rows)
    assert found["loss_ratio"] == pytest.approx(4.5 / 4.5)
    assert found["plain_loss_spread"] == pytest.approx(1 / 1.5)


def test_a_picture_of_made_up_rows(tmp_path: Path) -> None:
    rows = run.with_terms(made_up_waterfall())
    changes = [(name, 1e6 * before, 1e6 * after) for name, before, after in peak_changes(rows)]
    assert changes == [
        ("allocator", pytest.approx(900), pytest.approx(750)),
        ("codes", pytest.approx(750), pytest.approx(400)),
        ("release", pytest.approx(400), pytest.approx(410)),
    ]
    draw_waterfall(rows, tmp_path / "waterfall.png")
    pixels = np.asarray(Image.open(tmp_path / "waterfall.png").convert("RGB"))
    colours = {tuple(int(value) for value in colour) for colour in pixels.reshape(-1, 3)}
    assert {(0x2E, 0x8B, 0x57), (0x8E, 0x44, 0xAD), (0xC0, 0x39, 0x2B)} <= colours


@pytest.mark.parametrize("stage", run.STAGES)
def test_stages_are_cumulative(stage: str) -> None:
    entry = run.stage_entry(TINY, TINY.entries[0], stage)
    place = run.STAGES.index(stage)
    assert (entry.levers or ()) == run.STAGES[2 : place + 1]
    assert entry.return_freed_blocks == (place > 0)
    assert (entry.bits is not None) == (place > 1)


def test_an_unknown_lever_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown lever fusd; known: codes, fused"):
        lever_policy(["codes", "fusd"], 1)


def test_the_first_step_is_fused_and_gradients_are_released_in_backward() -> None:
    torch.manual_seed(0)
    model = resnet20(10).to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    target = torch.randint(0, 10, (8,))

    class Reached(list[Any]):
        """No plain list, which the dry run would give the entries that it had."""

    reached = Reached()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0])
        reached.append((len(batch[0]), _node_names(scores.grad_fn)))
        return F.cross_entropy(scores, batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = LeveredLoop(model, optimizer, LEVERS, bits=2, seed=0)
    loop.step((x, target), loss_fn)
    (few, rehearsed), (full, names) = reached
    assert (few, full) == (4, 8)
    assert "FusedNormBackward" not in rehearsed
    assert names.count("FusedNormBackward") == 19
    assert loop._release.count.released == len(list(model.parameters())) == 59
    assert loop._release.count.left_to_the_end == 0
    assert loop.gradient_bytes_peak < sum(each.nbytes for each in model.parameters()) / 4
    assert all(parameter.grad is None for parameter in model.parameters())
    counts = [buffer for buffer in model.buffers() if buffer.dtype is torch.int64]
    assert [int(count) for count in counts] == [1] * 19


def test_levers_leave_plain_training_as_it_is() -> None:
    """With no codes the loop is plain PyTorch's, but for the order of float additions."""
    found = []
    for levers in ((), ("fused", "release")):
        torch.manual_seed(0)
        model = resnet20(10)
        x, target = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = LeveredLoop(model, optimizer, levers, bits="plain", seed=0)
        for _ in range(2):
            loop.step((x, target), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        found.append(model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_the_full_job_is_the_issue_s() -> None:
    job = run.full_job("digits", "text:words.txt")
    shapes = [(entry.model, entry.batch_size, entry.optimizer) for entry in job.entries]
    assert shapes == [
        ("resnet18", 128, "sgd"),
        ("mobilenet_v2", 16, "sgd"),
        ("resnet50", 16, "sgd"),
        ("densenet121", 16, "sgd"),
        ("bert_small", 64, "adamw"),
        ("daf_bench.workloads.gpt2:gpt2_lora", 8, "adamw"),
    ]
    assert [entry.context for entry in job.entries] == [None] * 5 + [512]
    assert replace(job, entries=()).loss_seeds == (0, 1, 2)


def _node_names(root: Any) -> list[str]:
    found, open_nodes, names = {root}, [root], []
    while open_nodes:
        node = open_nodes.pop()
        names.append(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found.add(following)
                open_nodes.append(following)
    return names
