"""Random models are drawn from their seed alone; what survived is counted as it happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from daf_bench.harness import cgroup
from daf_bench.memory.random_events import Events, draw_events
from daf_bench.memory.random_models import build, described, draw
from daf_bench.memory.survival import Attempt, attempted, figures_of, is_refused_wrongly

WORKS, REASON = cgroup.can_limit()
MIB = 2**20


def test_a_seed_draws_the_same_and_all_families_come() -> None:
    drawn = [draw(seed) for seed in range(50)]
    assert drawn == [draw(seed) for seed in range(50)]
    assert {each.family for each in drawn} == {"mlp", "conv", "transformer"}
    assert {each.batch_statistics for each in drawn} == {True, False}
    assert len({each.optimizer for each in drawn}) == 4
    assert not any(each.batch_statistics for each in drawn if each.family == "transformer")
    assert described(drawn[0])["seed"] == 0


@pytest.mark.parametrize("family", ["mlp", "conv", "transformer"])
def test_what_is_drawn_trains(family: str) -> None:
    drawn = next(each for each in map(draw, range(50)) if each.family == family)
    work = build(drawn)
    assert work.batch[0].shape[0] == drawn.batch_size
    some = tuple(tensor[:4] for tensor in work.batch)
    before = [value.clone() for value in work.model.parameters()]
    loss = work.loss(work.model, some)
    loss.backward()
    work.optimizer.step()
    pairs = zip(before, work.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


@pytest.mark.thorough
@pytest.mark.skipif(not WORKS, reason=REASON)
def test_a_run_is_killed_refused_or_finishes_within() -> None:
    seed = next(each for each in range(50) if draw(each).family == "mlp")
    plain = attempted(Attempt(seed, None, 1))
    assert plain["outcome"] == "finished"
    floor, peak = plain["floor_bytes"], plain["peak_bytes"]
    assert peak - floor > 10 * MIB
    ample = attempted(Attempt(seed, 2 * peak - floor, 2))
    assert ample["outcome"] == "finished"
    assert ample["above_bytes"] == 0
    scarce = attempted(Attempt(seed, floor + 4 * MIB, 2))
    assert scarce["outcome"] == "refused"
    assert scarce["least_bytes"] > floor + 4 * MIB
    # Not even the interpreter fits: what a kill looks like.
    assert attempted(Attempt(seed, 8 * MIB, 1))["outcome"] == "killed"


def refused(**changes: Any) -> dict[str, Any]:
    row = {
        "part": "run",
        "moves": 0,
        "releases": False,
        "outcome": "refused",
        "budget_bytes": 500,
        "least_bytes": 600,
    }
    row |= {"at_least": {"outcome": "finished", "above_bytes": 0}}
    return row | {"at_less": {"outcome": "refused"}} | changes


@pytest.mark.parametrize(
    "row",
    [
        refused(least_bytes=None),
        refused(least_bytes=500),
        refused(at_least={"outcome": "refused"}),
        refused(at_least={"outcome": "finished", "above_bytes": 1}),
    ],
)
def test_a_refusal_that_does_not_hold_is_wrong(row: dict[str, Any]) -> None:
    assert is_refused_wrongly(row)
    assert not is_refused_wrongly(refused())
    assert not is_refused_wrongly(refused(at_less={"outcome": "finished", "above_bytes": 0}))


def test_figures_count_runs_and_what_refusals_claimed() -> None:
    finished = {"part": "run", "outcome": "finished", "above_bytes": 0, "moves": 2, "bursts": 3}
    figures = figures_of(
        [
            finished,
            finished | {"above_bytes": 5},
            {"part": "run", "outcome": "killed"},
            {"part": "run", "outcome": "crashed", "signal": 11},
            {"part": "run", "outcome": "raised"},
            refused(),
            refused(at_less={"outcome": "finished", "above_bytes": 0}),
            refused(at_least={"outcome": "killed"}),
        ]
    )
    assert (figures["runs"], figures["finished"], figures["refused"]) == (8, 2, 3)
    assert (figures["killed"], figures["above"], figures["raised_or_failed"]) == (2, 1, 1)
    assert (figures["crashed"], figures["moved"], figures["bursts_tried"]) == (1, 2, 6)
    assert (figures["refused_wrongly"], figures["least_failed"]) == (1, 1)
    assert figures["less_worked_share"] == pytest.approx(1 / 3)


def test_events_come_in_most_runs_and_follow_from_their_seed() -> None:
    drawn = [draw_events(seed, 4) for seed in range(200)]
    assert drawn == [draw_events(seed, 4) for seed in range(200)]
    quiet = sum(each == Events() for each in drawn)
    assert 40 < quiet < 120
    assert sum(bool(each.moves) for each in drawn) > 30
    assert sum(each.releases for each in drawn) > 20
    assert any(move.delay for each in drawn for move in each.moves)
    assert any(each.inside_bytes for each in drawn)
