"""The reduction benchmark: what it compares, its figures from a made-up table, its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daf.bench import reduce
from daf.bench.reduce import Shape, whole
from daf.bench.reduce_picture import draw_reduce
from daf.errors import KernelError


def row(rule: str | None = None, **microseconds: float) -> dict[str, object]:
    return {"microseconds": microseconds, "rule": rule}


def test_figures_are_worst_and_best_ratios() -> None:
    rows = [
        row(tree=10.0, atomics=8.0, hybrid=5.0, chosen=6.0, torch=12.0, cub=6.0, rule="atomics"),
        row(tree=4.0, atomics=9.0, hybrid=5.0, chosen=4.0, torch=3.0, cub=8.0, rule="tree"),
    ]
    assert reduce.figures_of(rows) == {
        "worst_vs_best": pytest.approx(1.2),
        "worst_vs_torch": pytest.approx(4 / 3),
        "hybrid_worst_vs_best": pytest.approx(1.25),
        "rule_worst_vs_best": pytest.approx(1.6),
        "worst_vs_cub": pytest.approx(1.0),
        "best_vs_cub": pytest.approx(0.5),
    }


def test_without_cub_or_a_rule_there_is_no_figure_of_it() -> None:
    figures = reduce.figures_of([row(tree=1.0, atomics=2.0, hybrid=3.0, chosen=1.0, torch=2.0)])
    assert set(figures) == {"worst_vs_best", "worst_vs_torch", "hybrid_worst_vs_best"}


def test_cub_is_compared_where_it_was_timed_and_the_rule_where_it_is_known_of_all() -> None:
    """CUB reduces whole tensors only; channels are timed without it."""
    common = {"tree": 4.0, "atomics": 2.0, "hybrid": 3.0, "chosen": 2.0, "torch": 4.0}
    figures = reduce.figures_of(
        [row(**common, cub=4.0, rule="tree"), row(**common | {"chosen": 20.0})]
    )
    assert figures["worst_vs_cub"] == figures["best_vs_cub"] == pytest.approx(0.5)
    assert figures["worst_vs_best"] == pytest.approx(10.0)
    assert "rule_worst_vs_best" not in figures


def test_every_strategy_runs_on_tensors_and_channels_and_one_of_them_is_chosen(
    tmp_path: Path,
) -> None:
    result = reduce.run(reduce.ReduceJob((whole(1000), Shape(3, 7, 11)), 2, "cpu"))
    shapes = [(found["outer"], found["channels"], found["inner"]) for found in result.rows]
    assert shapes == [(1, 1, 1000), (3, 7, 11)]
    for found in result.rows:
        assert set(found["microseconds"]) == {*reduce.STRATEGIES, reduce.TORCH, reduce.CHOSEN}
        assert {found["choice"], found["rule"]} <= set(reduce.STRATEGIES)
        assert all(value > 0 for value in found["microseconds"].values())
    draw_reduce(result.rows, tmp_path / "reduce.png")
    assert (tmp_path / "reduce.png").stat().st_size > 10_000


def test_a_reduction_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "measure_ranges", lambda *_: None)
    monkeypatch.setattr(reduce.torch, "empty", lambda *shape, **kind: torch.zeros(shape, **kind))
    with pytest.raises(KernelError, match="asked tree for the ranges"):
        reduce.run(reduce.ReduceJob((Shape(3, 7, 11),), 1, "cpu"))
