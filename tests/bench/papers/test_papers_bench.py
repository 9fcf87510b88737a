"""DAF as published beside ours: who takes part, what is compared, and that it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daf_bench.harness.method_runner import Way
from daf_bench.harness.result import BenchResult
from daf_bench.harness.subprocess_channel import ContestantError
from daf_bench.papers import equal_noise, eviction, in_turn
from daf_bench.papers.equal_noise import Coded, bytes_at
from daf_bench.papers.figures import figures_of
from daf_bench.papers.run import PapersJob, run
from daf_bench.sweep import run as sweep
from daf_bench.workloads.sources import Sources

MB = 10**6
PLAIN_MS, PUBLISHED_MS, OURS_MS = 10.0, 30.0, 15.0


class MadeUp:
    """A contender of made-up times and bytes; ``refuses`` says how budgets end."""

    refuses = ""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.ended = False
        self.steps = 0

    def prepare(self) -> dict[str, Any]:
        if self.refuses == "at once" and self.way.policy == "daf":
            return {"floor_bytes": 100 * MB, "refusal": "needs more", "least_bytes": 900 * MB}
        return {"floor_bytes": 100 * MB}

    def step(self) -> dict[str, Any]:
        self.steps += 1
        if self.way.budget_bytes is None:
            return {"loss": 1.0, "step_ms": PLAIN_MS, "peak_bytes": 500 * MB}
        if self.refuses == "late" and self.way.policy == "daf" and self.steps > 4:
            return {"raised": "no memory"}
        if self.refuses == "dies" and self.way.policy == "daf":
            raise ContestantError("it ended")
        published = self.way.policy == "daf"
        return {
            "step_ms": PUBLISHED_MS if published else OURS_MS,
            "peak_bytes": 300 * MB,
            "saved_bytes": 60 * MB if published else 20 * MB,
            "micro_batch": 4,
            "is_settled": self.steps > 6,
        }

    def facts(self) -> dict[str, Any]:
        if self.way.budget_bytes is None:
            return {"examples": 4, "saved_bytes_peak": None}
        return {"examples": 4, "session_peak_bytes": 299 * MB, "saved_bytes_plain": 90 * MB}

    def settled_gradient(self, path: Path) -> dict[str, Any]:
        path.write_bytes(bytes(4) if self.way.budget_bytes else b"\0\0\x80\x3f")
        return {}

    def end(self) -> None:
        self.ended = True


def noise_row(workload: str) -> dict[str, Any]:
    """Published codes of 20 bytes at an error half way between two of ours, of 10 and 20."""
    ours = [[1, 10, 0.4], [2, 20, 0.1]]
    found = {"ours": ours, "published": [[4, 20, 0.2]], "exact_bytes": 50}
    return {"part": "equal noise", "workload": workload, **found}


@pytest.mark.parametrize(
    ("error", "nbytes"), [(0.9, 10.0), (0.4, 10.0), (0.2, 15.0), (0.1, 20.0), (0.05, 42.5)]
)
def test_ours_holds_at_a_noise_what_lies_between_its_widths(error: float, nbytes: float) -> None:
    row = noise_row("w6")
    ours = [Coded(*each) for each in row["ours"]]
    assert bytes_at(error, ours, row["exact_bytes"]) == pytest.approx(nbytes)


def eviction_row(workload: str) -> dict[str, Any]:
    added = {"measured": 0.1, "uniform": 0.2, "shuffled": 0.3 if workload == "w6" else 0.25}
    caps = [
        {"share": share, **added, "inverted": 0.5, "whole activations": 0.4}
        for share in eviction.SHARES
    ]
    return {"part": "eviction", "workload": workload, "caps": caps}


@pytest.mark.thorough
def test_losing_the_planes_that_were_measured_to_matter_least_adds_least() -> None:
    row = eviction.measured("w6", None, is_small=True)
    for cap in row["caps"]:
        assert 0.0 < cap["measured"] < min(cap["shuffled"], cap["inverted"])
        assert cap["measured"] < cap["whole activations"]
    assert eviction.gains([row], "shuffled")[0] > 1.0


@pytest.mark.thorough
def test_a_workload_is_measured_at_every_width_and_noise_falls_with_it() -> None:
    row = equal_noise.measured("w6", None, is_small=True)
    for codes in (row["ours"], row["published"]):
        found = [Coded(*each) for each in codes]
        assert [each.bits for each in found] == [*equal_noise.WIDTHS]
        assert found[0].saved_bytes < found[-1].saved_bytes
        assert found[0].error > 4 * found[-1].error > 0.0
    assert 1 <= len(equal_noise.ratios(row)) <= len(equal_noise.WIDTHS)


def strategies_of(job: sweep.SweepJob, file: Path | None, _: Any) -> BenchResult:
    """What the sweep of SAGE's strategies returns, beside what it counts of our own plan."""
    assert (job.timed, job.percents) == (job.workloads, (50, 25))
    assert file is None or file.name == "policies.jsonl"
    figures = {"sage_models": len(job.workloads), "sage_vs_best_static_worst": 1.04, "points": 9}
    return BenchResult("sweep", [], figures)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[MadeUp]]:
    def install(refuses: str = "") -> list[MadeUp]:
        started: list[MadeUp] = []

        def start(way: Way) -> MadeUp:
            started.append(MadeUp(way))
            started[-1].refuses = refuses
            return started[-1]

        monkeypatch.setattr(in_turn, "Contender", start)
        monkeypatch.setattr(equal_noise, "measured", lambda name, *_, **__: noise_row(name))
        monkeypatch.setattr(eviction, "measured", lambda name, *_, **__: eviction_row(name))
        monkeypatch.setattr(sweep, "run", strategies_of)
        return started

    return install


def measured() -> dict[str, dict[str, Any]]:
    rows = in_turn.measured_in_turn(Way("w6"), 50, 3, lambda _: None)
    return {row["contestant"]: row for row in rows}


def test_both_get_half_of_what_plain_holds_above_the_floor(made_up) -> None:
    started = made_up()
    rows = measured()
    assert [child.way.policy for child in started] == [None, "daf", None]
    assert [child.way.budget_bytes for child in started] == [None, 300 * MB, 300 * MB]
    assert all(child.ended for child in started)
    assert rows["optimal"]["step_vs_daf"] == OURS_MS / PUBLISHED_MS
    assert rows["daf"]["step_vs_plain"] == PUBLISHED_MS / PLAIN_MS
    assert rows["daf"]["saved_bytes"] == 60 * MB
    assert rows["optimal"]["gradient_error"] == 1.0
    assert len(rows["daf"]["steps_ms"]) == 3
    assert [child.steps for child in started] == [2 + 3, 7 + 3, 7 + 3]


@pytest.mark.parametrize(
    ("how", "word", "said"),
    [
        ("at once", "refused", "needs more"),
        ("late", "refused", "no memory"),
        ("dies", "failed", "it ended"),
    ],
)
def test_who_is_refused_has_a_row_with_the_reason_and_the_others_go_on(
    made_up, how: str, word: str, said: str
) -> None:
    made_up(how)
    rows = measured()
    assert rows["daf"][word] == said
    assert "steps_ms" not in rows["daf"]
    assert len(rows["optimal"]["steps_ms"]) == 3
    assert "step_vs_daf" not in rows["optimal"]


def test_figures_count_what_was_tried_and_name_no_ratio_of_nothing(made_up) -> None:
    made_up("at once")
    figures = run(PapersJob(("w6",), steps=3, sources=Sources(None))).figures
    assert figures["daf_published_tried"] == figures["refused"] == 1
    assert figures["daf_published_runs"] == figures["compared"] == figures["over_budget"] == 0
    assert figures["rows"] >= 25
    assert figures["rows_without_command"] == 0
    assert "ours_vs_daf_published_saved_at_budget" not in figures


def test_medians_are_over_workloads_and_what_passes_a_budget_is_counted(made_up) -> None:
    made_up()
    result = run(PapersJob(("w6", "w3"), steps=3, sources=Sources(None)))
    assert result.figures["ours_vs_daf_published_saved_at_budget"] == 3.0
    assert result.figures["ours_vs_daf_published_saved"] == pytest.approx(20 / 15)
    assert result.figures["ours_vs_daf_published_step"] == OURS_MS / PUBLISHED_MS
    assert result.figures["eviction_importance_gain"] == pytest.approx(2.5)
    assert result.figures["eviction_inverted_over_measured"] == pytest.approx(5.0)
    assert result.figures["eviction_whole_over_planes"] == pytest.approx(4.0)
    assert result.figures["sage_models"] == 1
    assert result.figures["sage_vs_best_static_worst"] == 1.04
    assert "points" not in result.figures
    assert result.figures["daf_published_runs"] == result.figures["compared"] == 2
    over = [{**row, "peak_bytes": 301 * MB} if "peak_bytes" in row else row for row in result.rows]
    figures = figures_of(over)
    assert figures["over_budget"] == 4
    assert figures["daf_published_runs"] == 0
    assert "not measured: w1, w2a" in result.notes[1]


def test_it_goes_on_where_it_stopped(made_up, tmp_path: Path) -> None:
    started, file = made_up(), tmp_path / "rows.jsonl"
    job = PapersJob(("w6",), steps=3, sources=Sources(None))
    first = run(job, file)
    more = run(PapersJob(("w6", "w3"), steps=3, sources=Sources(None)), file)
    assert len(started) == 6
    assert [row for row in more.rows if row.get("workload") == "w6"] == [
        row for row in first.rows if row.get("workload") == "w6"
    ]


@pytest.mark.thorough
def test_a_small_workload_is_trained_or_refused_by_all() -> None:
    result = run(PapersJob(("w6",), steps=2, is_small=True, sources=Sources(None)))
    figures = result.figures
    assert figures["daf_published_tried"] == 1
    assert figures["failed"] == figures["over_budget"] == 0
    assert figures["daf_published_runs"] + figures["refused"] >= 1
