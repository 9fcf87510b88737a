"""The reduction benchmark: what it compares, its figures from a made-up table, its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from daf_bench.kernels import reductions
from daf_bench.kernels.reductions import LEAST_JUDGED, Shape, whole
from daf_bench.kernels.reductions_plot import draw_reduce

from daf.codecs import ranges
from daf.codecs.ranged import WHOLE, Cut
from daf.core.errors import KernelError


def row(
    picked: str, rule: str | None = None, first_use_ms: float = 1.0, **seconds: float
) -> dict[str, object]:
    taken = {name: [found] for name, found in seconds.items()}
    told = {"ratios": reductions.ratios_of(taken), "rule": rule, "first_use_ms": first_use_ms}
    told |= {"picked_vs_best": reductions.picked_vs_best(taken, picked), "look_up_us": 0.5}
    return told | whole(LEAST_JUDGED)._asdict()


def test_figures_are_worst_and_best_ratios() -> None:
    first = {"tree": 10.0, "atomics": 8.0, "hybrid": 5.0, "chosen": 6.0, "torch": 12.0, "cub": 6.0}
    second = {"tree": 4.0, "atomics": 9.0, "hybrid": 5.0, "chosen": 4.0, "torch": 3.0, "cub": 8.0}
    rows = [row("hybrid", "atomics", **first), row("tree", "tree", 9.0, **second)]
    assert reductions.figures_of(rows) == {
        "worst_vs_best": pytest.approx(4 / 3),  # PyTorch's own might have been chosen
        "look_up_us_worst": 0.5,
        "worst_vs_torch": pytest.approx(4 / 3),
        "hybrid_worst_vs_best": pytest.approx(5 / 3),
        "rule_worst_vs_best": pytest.approx(1.6),
        "worst_vs_cub": pytest.approx(1.0),
        "best_vs_cub": pytest.approx(0.5),
        "first_use_ms_worst": 9.0,
    }


def test_small_tensors_are_not_judged_and_what_picking_takes_is_told_apart() -> None:
    common = {"tree": 1.0, "atomics": 2.0, "hybrid": 3.0, "chosen": 9.0, "torch": 2.0}
    small = row("hybrid", **common) | whole(LEAST_JUDGED - 1)._asdict()
    figures = reductions.figures_of([small, row("tree", **common)])
    assert figures["worst_vs_best"] == 1.0
    assert reductions.figures_of([small])["worst_vs_best"] == 1.0


def test_a_pick_is_judged_by_the_near_end_of_its_interval() -> None:
    """Of fifteen rounds the fourth smallest ratio; one round alone is what it is."""
    tree, others = [1.0] * 15, {"atomics": [9.0] * 15, "hybrid": [9.0] * 15}
    picked = [1.0, 1.01, 1.02, 1.03, *[1.2] * 11]
    taken = {"tree": tree, "torch": picked, **others}
    assert reductions.picked_vs_best(taken, "torch") == pytest.approx(1.03)
    assert reductions.picked_vs_best({n: t[-1:] for n, t in taken.items()}, "torch") == 1.2


def test_without_cub_or_a_rule_there_is_no_figure_of_it() -> None:
    common = {"tree": 1.0, "atomics": 2.0, "hybrid": 3.0, "chosen": 1.0, "torch": 2.0}
    figures = reductions.figures_of([row("tree", **common)])
    of_all = {"worst_vs_best", "worst_vs_torch", "hybrid_worst_vs_best", "first_use_ms_worst"}
    assert set(figures) == of_all | {"look_up_us_worst"}


def test_cub_is_compared_where_it_was_timed_and_the_rule_where_it_is_known_of_all() -> None:
    """CUB reduces whole tensors only; channels are timed without it."""
    common = {"tree": 4.0, "atomics": 2.0, "hybrid": 3.0, "chosen": 2.0, "torch": 4.0}
    figures = reductions.figures_of(
        [row("atomics", "tree", **common, cub=4.0), row("torch", **common)]
    )
    assert figures["worst_vs_cub"] == figures["best_vs_cub"] == pytest.approx(0.5)
    assert figures["worst_vs_best"] == pytest.approx(2.0)
    assert "rule_worst_vs_best" not in figures


def test_noise_does_not_tell_what_is_chosen_from_itself() -> None:
    """The machine is two to nine times as slow in some rounds, which medians of each would show."""
    slow = [1.0, 9.0, 1.0, 4.0, 2.0]
    tree = [1e-3 * each for each in slow]
    hiccup = [*tree[:4], 9 * tree[4]]
    taken = {
        "tree": tree,
        "atomics": [8 * each for each in tree],
        "hybrid": [2 * each for each in tree],
        "torch": [4 * each for each in reversed(tree)],
        "chosen": hiccup,
    }
    ratios = reductions.ratios_of(taken)
    assert ratios["best"]["chosen"] == pytest.approx(1.0)
    assert ratios["best"]["hybrid"] == pytest.approx(2.0)
    assert ratios["torch"]["torch"] == pytest.approx(1.0)


def test_every_strategy_runs_on_tensors_and_channels_and_one_of_them_is_chosen(
    tmp_path: Path,
) -> None:
    result = reductions.run(reductions.ReduceJob((whole(1000), Shape(3, 7, 11)), 2, "cpu"))
    shapes = [(found["outer"], found["channels"], found["inner"]) for found in result.rows]
    assert shapes == [(1, 1, 1000), (3, 7, 11)]
    for found in result.rows:
        assert set(found["microseconds"]) == {*reductions.CANDIDATES, reductions.CHOSEN}
        assert found["choice"] in reductions.CANDIDATES
        assert found["rule"] in reductions.STRATEGIES
        assert all(value > 0 for value in found["microseconds"].values())
    draw_reduce(result.rows, tmp_path / "reduce.png")
    assert (tmp_path / "reduce.png").stat().st_size > 10_000


def test_what_is_chosen_is_chosen_as_in_sessions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the same classes, strategies and file format; not with the user's own file."""
    monkeypatch.setenv("DAF_CACHE", str(tmp_path / "users"))
    caches: list[Path | None] = []
    begin = ranges.Ranges.__init__

    def noted(made: ranges.Ranges, cache: Path | None) -> None:
        caches.append(cache)
        begin(made, cache)

    asked: list[tuple[int, Cut]] = []

    def picked(_made: ranges.Ranges, tensor: torch.Tensor, cut: Cut) -> str:
        asked.append((tensor.numel(), cut))
        return ranges.PYTORCH if len(asked) % 2 else "atomics"

    monkeypatch.setattr(ranges.Ranges, "__init__", noted)
    monkeypatch.setattr(ranges.Ranges, "strategy_for", picked)
    result = reductions.run(reductions.ReduceJob((whole(1000), Shape(3, 7, 11)), 2, "cpu"))
    assert result.rows[0]["choice"] in {reductions.TORCH, "atomics"}
    assert set(asked) == {(1000, WHOLE), (231, Cut(7, 11))}
    (cache,) = caches
    assert cache is not None
    assert not cache.exists()  # in a folder that is gone
    assert not (tmp_path / "users").exists()


def test_a_reduction_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (torch.zeros(7), torch.zeros(7))
    monkeypatch.setattr(reductions, "ends_by", lambda *_: wrong)
    with pytest.raises(KernelError, match="asked tree for the ranges"):
        reductions.run(reductions.ReduceJob((Shape(3, 7, 11),), 1, "cpu"))
