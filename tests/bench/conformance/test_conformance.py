"""Conformance: the quick part of every group, and a judge that can say no."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from daf_bench.conformance import run, trial, ways
from daf_bench.conformance.case import Case, Work, built
from daf_bench.conformance.pool import run_apart
from daf_bench.conformance.trial import try_case
from thoroughness import ALL
from torch import Tensor, nn

from daf.profiling import split_choice
from daf.step import gradient
from daf.step.loss_weights import Weighing

# A few of each kind: what couples, what weighs, what writes, what draws, and what is plain.
QUICK = (
    "situations/info_nce",
    "situations/ignored_labels",
    "operators/tanh",
    "modules/nn.LayerNorm/gated",
    *(
        (
            "situations/class_weights",
            "situations/python_random",
            "situations/own_accumulated_gradient",
        )
        if ALL
        else ()
    ),
)
WEIGHING = [each for each in ("ignored_labels", "class_weights") if f"situations/{each}" in QUICK]


def cases() -> dict[str, Case]:
    groups = {name.partition("/")[0] for name in QUICK}
    return {case.name: case for group in sorted(groups) for case in run.cases_of(group)[0]}


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    found = cases()
    return {name: try_case(found[name], 0) for name in QUICK}


@pytest.mark.parametrize("name", QUICK)
def test_nothing_differs_silently_and_nothing_raises(name: str, rows: dict[str, Any]) -> None:
    assert rows[name]["outcome"] == "tried"
    assert run.troubles([rows[name]]) == []
    assert not run.is_over_budget(rows[name])


def test_levers_act_where_they_were_proven_and_nowhere_else(rows: dict[str, Any]) -> None:
    assert "split" not in run.acted_levers(rows["situations/info_nce"])
    for name in (*(f"situations/{each}" for each in WEIGHING), "operators/tanh"):
        assert {"split", "replay", "fused", "coded"} <= set(run.acted_levers(rows[name])), name


def mean(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def labelled() -> Work:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))
    return Work(model, (torch.randn(12, 8), torch.randint(0, 5, (12,))), mean)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Cases are tried these ways and no others."""
    monkeypatch.setattr(trial, "WAYS", {name: trial.WAYS[name] for name in names})


def test_a_gradient_that_is_wrong_in_parts_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "exact", "split")
    monkeypatch.setattr(gradient, "scale_gradients", lambda *_: None)  # sums stay undivided
    row = try_case(Case("made/undivided", labelled), 0)
    assert row["ways"]["split"]["outcome"] == "wrong"
    assert row["ways"]["exact"]["outcome"] == "right"
    assert run.is_different(row)
    assert run.figures_of([row], {})["silent_differences"] == 1


def test_a_proof_that_accepts_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.1.0 cut whatever had a first dimension."""

    class Trusting(split_choice.SplitProof):
        def run(self, *_: Any) -> tuple[Weighing, str]:
            return Weighing.EXAMPLES, ""

    monkeypatch.setattr(split_choice, "SplitProof", Trusting)
    only(monkeypatch, "split")
    row = try_case(cases()["situations/info_nce"], 0)
    assert row["ways"]["split"]["outcome"] == "wrong"


class Gated(nn.Module):
    """A ReLU that opens where its parameter lies three units in the last place further."""

    def __init__(self, units: int, slope: float = 0.01) -> None:
        super().__init__()
        self.body, self.slope = nn.Linear(8, 5), slope
        self.gate = nn.Parameter(torch.tensor([1.0 + units * torch.finfo(torch.float32).eps]))
        self.threshold = 1.0 + 3 * torch.finfo(torch.float32).eps

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.slope * torch.relu(self.gate - self.threshold)


def gated(units: int, slope: float = 0.01) -> Work:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean() + model(batch).mean()

    return Work(Gated(units, slope), torch.randn(12, 8), loss)


@pytest.mark.parametrize(
    ("units", "slope", "is_right"), [(2, 0.01, True), (4, 0.01, True), (4, 0.02, False)]
)
def test_the_other_side_of_a_relu_is_right_where_roundings_reach_it(
    units: int, slope: float, is_right: bool
) -> None:
    judge = trial._judge(Case("made/gated", lambda: gated(0)), 0)
    other = ways.train_plain(built(Case("made/other", lambda: gated(units, slope)), 0), judge.rate)
    assert trial._apart(judge.plain, other) > (1e-3 if units > 3 else 0.0)
    verdict = trial._held(judge, judge.plain, other, 0.0)
    assert verdict is not None
    assert verdict.is_right == is_right


def test_a_lever_that_acted_before_and_does_not_now_is_lost(rows: dict[str, Any]) -> None:
    row = rows["situations/info_nce"]
    record = {row["case"]: ["split", "replay"]}
    figures = run.figures_of([row], record)
    assert run.levers_lost([row], record) == [(row["case"], "split")]
    assert figures["levers_lost_share"] == 0.5
    assert figures["tried"] == 1
    assert figures["replay_acted"] == 1
    assert figures["split_acted"] == 0


def ended(item: str) -> dict[str, Any]:
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "hang":
        time.sleep(60)
    if item == "raise":
        raise ValueError("said so")
    return {"outcome": "tried"}


def test_a_case_that_crashes_or_hangs_is_told_and_the_others_run() -> None:
    items = ["fine", "crash", "hang", "raise", "fine too"]
    found = dict(run_apart(ended, items, workers=2, limit_s=3.0))
    outcomes = {item: row["outcome"] for item, row in found.items()}
    assert outcomes == {
        "fine": "tried",
        "crash": "crashed",
        "hang": "hung",
        "raise": "failed",
        "fine too": "tried",
    }
    assert "SIGSEGV" in found["crash"]["words"]
    assert "said so" in found["raise"]["words"]


def test_the_suite_lists_as_many_cases_as_it_should() -> None:
    situations, _ = run.cases_of("situations")
    assert len(situations) >= 200
    names = [case.name for group in ("situations", "operators", "modules", "sizable")
             for case in run.cases_of(group)[0]]  # fmt: skip
    assert len(names) == len(set(names)) >= 800


def test_a_run_goes_on_where_its_rows_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    some = [Case(f"made/{place}", labelled) for place in range(3)]
    monkeypatch.setitem(run._GROUPS, "made", lambda: some)

    def attempted(by_name: dict[str, Case], seed: int, name: str) -> dict[str, Any]:
        return {"outcome": "skipped", "reason": "not here"}

    def told(name: str, _done: int, _all: int) -> None:
        tried.append(name)

    monkeypatch.setattr(run, "_attempt", attempted)
    job = run.ConformanceJob(groups=("made",), stride=2)
    run.run(job, tmp_path / "rows.jsonl", told, tmp_path / "none.json")
    assert sorted(tried) == ["made/0", "made/2"]
    result = run.run(
        run.ConformanceJob(groups=("made",)), tmp_path / "rows.jsonl", told, tmp_path / "none.json"
    )
    assert sorted(tried) == ["made/0", "made/1", "made/2"]
    assert result.figures["skipped"] == 3
