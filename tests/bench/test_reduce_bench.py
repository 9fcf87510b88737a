"""The reduction benchmark: what it compares, and its figures from a made-up table."""

from __future__ import annotations

import pytest

from daf.bench import reduce


def row(**microseconds: float) -> dict[str, object]:
    names = {"torch": reduce.TORCH}
    return {"microseconds": {names.get(name, name): value for name, value in microseconds.items()}}


def test_figures_are_worst_and_best_ratios_of_the_chosen() -> None:
    rows = [
        row(tree=10.0, atomics=8.0, hybrid=5.0, chosen=6.0, torch=12.0, cub=6.0),
        row(tree=4.0, atomics=9.0, hybrid=5.0, chosen=4.0, torch=3.0, cub=8.0),
    ]
    assert reduce.figures_of(rows) == {
        "worst_vs_best": pytest.approx(1.2),
        "worst_vs_torch": pytest.approx(4 / 3),
        "worst_vs_cub": pytest.approx(1.0),
        "best_vs_cub": pytest.approx(0.5),
    }


def test_without_cub_there_is_no_figure_of_it() -> None:
    rows = [row(tree=1.0, atomics=2.0, hybrid=3.0, chosen=1.0, torch=2.0)]
    assert "worst_vs_cub" not in reduce.figures_of(rows)


def test_every_strategy_runs_on_the_processor_and_one_of_them_is_chosen() -> None:
    result = reduce.run(reduce.ReduceJob((1000, 5000), 2, "cpu"))
    assert [found["elements"] for found in result.rows] == [1000, 5000]
    for found in result.rows:
        assert set(found["microseconds"]) == {*reduce.STRATEGIES, reduce.TORCH, reduce.CHOSEN}
        assert found["choice"] in reduce.STRATEGIES
        assert all(value > 0 for value in found["microseconds"].values())
