"""The side-by-side measures all beside plain, goes on where it stopped, and keeps its time."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daf_bench.harness.method_runner import Way
from daf_bench.harness.result import median_ratio
from daf_bench.harness.subprocess_channel import Child, ContestantError, TooLateError
from daf_bench.peers import duel as peers_duel
from daf_bench.peers import row as peers_row
from daf_bench.peers import run as peers_job
from daf_bench.peers.duel import measure_duel, pairs_of
from daf_bench.peers.figures import figures_of
from daf_bench.peers.page import COLUMNS, cells, peers_page
from daf_bench.peers.plot import draw_peers
from daf_bench.peers.row import MOST_WARM_UP_STEPS, warm_up_steps
from daf_bench.peers.run import PeersJob
from daf_bench.peers.table import (
    BASELINE,
    FULL,
    LEAST,
    PEER,
    QUICK,
    by_peer,
    by_policy,
    ours_at,
    ours_with,
)
from daf_bench.peers.verdicts import DUEL, best_peer, losses, verdicts
from daf_bench.workloads import WORKLOADS
from daf_bench.workloads.sources import Sources
from typer.testing import CliRunner

from daf.cli import app
from daf.core.errors import RunFolderError

CONTESTANTS = (
    by_peer("checkpointing (SGC)", "checkpoint", 1.0),
    by_peer(BASELINE, "gact", 2),
    by_policy("DGC", "checkpoint", 50),
    ours_with(2),
    ours_at(-30),  # sessions give libraries' code back: they hold less than plain's floor
    by_peer("torch.compile", "compile", compiles=True),
)
# No minute is left for compilers, which come last.
TINY = PeersJob(("w6",), CONTESTANTS, 2, (), is_small=True, sources=Sources(None))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    file = tmp_path_factory.mktemp("peers") / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PATH", "/nowhere")  # without compilers
        return peers_job.run(TINY, file), file


@pytest.mark.thorough
def test_the_whole_table_is_measured_and_refusals_are_told(measured: Any) -> None:
    rows = {row["contestant"]: row for row in measured[0].rows if row["kind"] != DUEL}
    assert list(rows) == ["plain", *(asked.label for asked in CONTESTANTS)]
    plain, ours, coded = rows["plain"], rows["DAF, 2 bits"], rows[BASELINE]
    assert (plain["peak_ratio"], plain["step_ratio"], plain["gradient_error"]) == (1.0, 1.0, 0.0)
    assert plain["saved_bytes_peak"] == ours["saved_bytes_plain"]
    assert ours["saved_bytes_peak"] < coded["saved_bytes_peak"] < plain["saved_bytes_peak"]
    checkpointed = rows["checkpointing (SGC)"]
    assert checkpointed["gradient_error"] == 0.0
    assert checkpointed["saved_bytes_peak"] < plain["saved_bytes_peak"]
    assert checkpointed["loss"] == plain["loss"]
    # What the codes' table foretells: min-max at two bits errs more than rotated ones.
    assert 0.01 < ours["gradient_error"] < coded["gradient_error"]
    above = plain["peak_bytes"] - plain["floor_bytes"]
    assert rows["DGC, 50 %"]["budget_bytes"] == plain["floor_bytes"] + above // 2
    assert rows["DGC, 50 %"]["peak_bytes"] <= rows["DGC, 50 %"]["predicted_peak_bytes"]
    assert rows["DGC, 50 %"]["predicted_peak_bytes"] <= rows["DGC, 50 %"]["budget_bytes"]
    assert rows["DGC, 50 %"]["gradient_error"] == 0.0
    assert "asked for a budget of" in rows["DAF, -30 %"]["refused"]
    assert rows["DAF, -30 %"]["least_bytes"] > rows["DAF, -30 %"]["budget_bytes"]
    assert "needs one of" in rows["torch.compile"]["refused"]


@pytest.mark.thorough
def test_daf_and_the_baseline_are_stepped_in_turn_with_each_other(measured: Any) -> None:
    result = measured[0]
    (duel,) = [row for row in result.rows if row["kind"] == DUEL]  # DAF at -30 % was refused
    assert (duel["workload"], duel["contestant"], duel["against"]) == (
        "w6",
        "DAF, 2 bits",
        BASELINE,
    )
    assert len(duel["own_ms"]) == len(duel["other_ms"]) == TINY.steps
    assert duel["ratio"] == pytest.approx(median_ratio(duel["own_ms"], duel["other_ms"]))
    assert result.figures["w6_speed_vs_minmax_baseline"] == pytest.approx(1 / duel["ratio"])


@pytest.mark.thorough
def test_it_goes_on_where_it_stopped(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result, file = measured
    lines = file.read_text().splitlines()
    kept = [line for line in lines if "torch.compile" not in line]
    assert len(kept) == len(lines) - 1
    file.write_text("\n".join(kept) + "\n")
    monkeypatch.setenv("PATH", "/nowhere")
    again = peers_job.run(TINY, file)
    assert again.rows[:-2] == result.rows[:-2]
    assert again.rows[-2]["contestant"] == "torch.compile"
    assert again.rows[-1] == result.rows[-1]  # the two in turn were not measured again
    assert peers_job.run(TINY, file).rows == again.rows
    fewer = replace(TINY, contestants=CONTESTANTS[:1])  # rows are asked for by their names
    told: list[tuple[int, int]] = []
    found = peers_job.run(fewer, file, lambda _, done, count: told.append((done, count)))
    assert found.rows == again.rows[:2]
    assert told == [(2, 2), (2, 2)]  # of those asked for, whatever else the file holds
    with pytest.raises(RunFolderError, match="another measurement"):
        peers_job.run(replace(TINY, steps=3), file)


@pytest.mark.thorough
def test_the_page_and_the_picture_show_everybody(measured: Any, tmp_path: Path) -> None:
    result = measured[0]
    page = peers_page(result.rows, result.figures, result.notes)
    assert page.count('class="bar measured"') == 2  # one of DAF's in each of two charts
    assert "DAF, -30 % did not run: asked for a budget of" in page
    assert "Where a peer wins" in page
    assert all(len(cells(row)) == len(COLUMNS) for row in result.rows if row["kind"] != DUEL)
    draw_peers(result.rows, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 15_000


def test_time_that_is_over_is_told_and_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    job = PeersJob(("w6",), CONTESTANTS, minutes=1e-9, is_small=True, sources=Sources(None))
    result = peers_job.run(job, file)
    assert [row["contestant"] for row in result.rows] == ["plain"]
    assert "not time enough" in result.rows[0]["late"]
    assert len(file.read_text().splitlines()) == 1  # what is measured, and no row
    assert "plain did not run" in verdicts(result.rows)[0]


def test_a_workload_that_cannot_begin_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Any) -> dict[str, Any]:
        if self._name == "w3":
            raise ContestantError("'w3, plain' ended with code 1")
        return {"floor_bytes": 0, "peak_bytes": 100, "step_ms": 1.0}

    monkeypatch.setattr(peers_job._Workload, "_measure_plain", fails)
    job = PeersJob(("w3", "w6"), (), sources=Sources(None))
    rows = peers_job.run(job).rows
    assert rows[0]["failed"] == "'w3, plain' ended with code 1"
    assert [row["workload"] for row in rows] == ["w3", "w6"]


def test_who_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("import sys; sys.stdin.read()")
    waiting = Child("silent", {}, "silent", environment=os.environ | {"PYTHONPATH": str(tmp_path)})
    waiting.until_s = time.monotonic() + 0.2
    with pytest.raises(TooLateError, match="silent"):
        waiting.ask("step")
    assert waiting.end() == -signal.SIGKILL


def test_where_time_is_short_compilers_come_after_everybody_on_all_workloads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[str, str]] = []

    def row_of(name: str, made: Any) -> dict[str, Any]:
        order.append((name, made))
        return {"floor_bytes": 0, "peak_bytes": 100, "step_ms": 1.0}

    monkeypatch.setattr(peers_job._Workload, "_measure_plain", lambda self: row_of(self._name, ""))
    monkeypatch.setattr(peers_job, "measure_beside", lambda way, *_: row_of(way.workload, way.peer))
    budget = by_peer("activation budget", "activation-budget", 0.5, compiles=True)
    chosen = (CONTESTANTS[-1], budget, CONTESTANTS[0])  # the last one does not compile
    job = PeersJob(("w6", "w5"), chosen, minutes=1.0, sources=Sources(None))
    result = peers_job.run(job)
    assert order == [
        *(("w6", ""), ("w6", "checkpoint"), ("w5", ""), ("w5", "checkpoint")),
        *(("w6", "compile"), ("w5", "compile")),
        *(("w6", "activation-budget"), ("w5", "activation-budget")),
    ]
    assert [row["workload"] for row in result.rows] == ["w6"] * 4 + ["w5"] * 4
    order.clear()
    peers_job.run(replace(job, minutes=None))
    assert [name for name, _ in order] == ["w6"] * 4 + ["w5"] * 4


def test_quick_has_every_kind_of_the_full_comparison() -> None:
    job = peers_job.quick_job()
    assert {name[:2] for name in job.workloads} == {name[:2] for name in WORKLOADS}
    assert {asked.kind for asked in QUICK} == {asked.kind for asked in FULL}
    assert all(asked in FULL for asked in QUICK)
    named = {asked.changes.get("peer") for asked in QUICK} - {None}
    assert named >= {"checkpoint", "accumulate", "disk", "gact", "compile", "activation-budget"}
    compiling = [asked.compiles for asked in FULL]
    assert compiling == sorted(compiling)  # last, so that they take nobody's time
    assert len({asked.label for asked in FULL}) == len(FULL)


def test_half_as_many_steps_come_before_those_that_are_timed() -> None:
    assert [warm_up_steps(steps) for steps in (1, 2, 5, 20)] == [2, 2, 2, 10]
    order: list[str] = []

    def step(name: str) -> dict[str, float]:
        order.append(name)
        return {"step_ms": 1.0}

    ours, plain = (SimpleNamespace(step=partial(step, name)) for name in ("ours", "plain"))
    found = peers_row._interleaved(ours, plain, 6)  # type: ignore[arg-type]
    assert [len(side) for side in found] == [9, 6]
    assert order[:3] == ["ours"] * 3
    assert order[3:7] == ["plain", "ours", "ours", "plain"]  # whoever was first is then second


@pytest.mark.parametrize("settled_after", [1, 5, 1000])
def test_a_session_that_tries_plans_is_timed_once_it_has_one(settled_after: int) -> None:
    done: list[dict[str, Any]] = []

    def step() -> dict[str, Any]:
        done.append({"step_ms": 1.0, "is_settled": len(done) + 1 >= settled_after})
        return done[-1]

    plain = SimpleNamespace(step=lambda: {"step_ms": 1.0})
    ours, theirs = peers_row._interleaved(SimpleNamespace(step=step), plain, 6)  # type: ignore[arg-type]
    assert len(theirs) == 6
    assert len(ours) == 6 + {1: 3, 5: 5, 1000: MOST_WARM_UP_STEPS}[settled_after]


def test_nothing_is_asked_of_a_session_that_was_refused() -> None:
    answers = iter([{"step_ms": 1.0, "is_settled": False}, {"raised": "no room"}])
    ours, theirs = peers_row._interleaved(
        SimpleNamespace(step=lambda: next(answers)),  # type: ignore[arg-type]
        SimpleNamespace(step=lambda: pytest.fail("plain is asked for nothing")),  # type: ignore[arg-type]
        6,
    )
    assert ours[-1] == {"raised": "no room"}
    assert theirs == []


def test_losses_are_of_the_same_steps_whoever_warmed_up_longer() -> None:
    facts = {"examples": 4, "saved_bytes_peak": 0}

    def loss(count: int) -> float:
        done = [{"loss": float(at), "step_ms": 1.0, "peak_bytes": 9} for at in range(count)]
        return float(peers_row._row_of(done, 6, facts, (1, 9))["loss"])

    assert loss(3 + 6) == loss(20 + 6) == pytest.approx(7.0)  # the sixth to the eighth


def row(name: str, peak: float, step: float, kind: str = PEER, **more: Any) -> dict[str, Any]:
    found = {"workload": "w1", "contestant": name, "peak_ratio": peak, "step_ratio": step}
    found |= {"kind": kind, "percent": None, "same_mathematics": True, "gradient_error": 0.0}
    return found | more


def test_words_say_who_beats_each_run_of_daf() -> None:
    ours = row("DAF", 0.5, 1.2, "daf")
    lost = {"workload": "w1", "contestant": "C", "kind": PEER, "failed": "killed"}
    other = row("D", 0.1, 0.9, same_mathematics=False)
    rows = [row("plain", 1.0, 1.0), row("A", 0.4, 1.1), row("B", 0.9, 2.0), other, ours, lost]
    assert verdicts(rows) == [
        "Fastest: D, 0.90 × plain's step at 0.10 × its peak.",
        "Smallest: D, 0.10 × plain's peak at 0.90 × its step.",
        "Beside DAF: faster are “plain”, “A” and “D” (another computation); smaller are “A” and "
        "“D” (another computation); both are “A” and “D” (another computation).",
        "C did not run: killed.",
    ]
    alone = verdicts([row("plain", 1.0, 1.0), row("DAF", 0.5, 1.2, "daf")])
    assert alone[-1] == "Beside DAF: faster is “plain”; smaller is nobody; both is nobody."


def test_every_loss_is_said_and_none_is_invented() -> None:
    peers = [row("plain", 1.0, 1.0), row("A", 0.48, 1.1, "published"), row("B", 0.3, 2.0)]
    ours = row("DAF, 50 %", 0.5, 1.2, "daf", percent=50, gradient_error=0.125)
    assert losses([*peers, ours]) == [
        "w1: “A” (1.10 × plain's step, 0.48 × its peak, gradient error 0) beats “DAF, 50 %” "
        "(1.20 × plain's step, 0.50 × its peak, gradient error 0.12)."
    ]
    refused = {"workload": "w1", "contestant": "DAF, 35 %", "kind": "daf", "percent": 35}
    assert losses([*peers, refused | {"refused": "no plan"}]) == [
        "w1: DAF, 35 % does not train, and “B” (2.00 × plain's step, 0.30 × its peak, gradient "
        "error 0) does."
    ]
    # Smaller but slower is no loss within a budget, nor is another computation.
    winning = row("DAF, 50 %", 0.5, 1.05, "daf", percent=50)
    other = row("accumulation", 0.2, 0.9, same_mathematics=False)
    nowhere = losses([*peers, other, winning])
    assert nowhere == ["No peer that computes what plain does beats DAF anywhere in these tables."]
    # Without a budget it must be beaten on both.
    assert losses([*peers, row("DAF, 2 bits", 0.4, 1.05, "daf")]) == nowhere
    assert len(losses([*peers, row("DAF, 2 bits", 0.49, 1.15, "daf")])) == 1


def duel(ours: str, theirs: str, ratio: float) -> dict[str, Any]:
    found = {"workload": "w1", "kind": DUEL, "contestant": ours, "against": theirs}
    return found | {"ratio": ratio}


def test_two_stepped_in_turn_with_each_other_decide_who_is_faster() -> None:
    rows = [
        *(row("plain", 1.0, 1.0), row("A", 0.48, 0.8), row("B", 0.4, 0.9), row("C", 0.3, 1.5)),
        row("DAF, 50 %", 0.5, 1.2, "daf", percent=50),
    ]

    def said(*duels: dict[str, Any]) -> list[str]:
        return [sentence.partition(": ")[2] for sentence in losses([*rows, *duels])]

    told = {
        name: f"“{name}” ({step:.2f} × plain's step, {peak:.2f} × its peak, gradient error 0)"
        for name, peak, step in (("A", 0.48, 0.8), ("B", 0.4, 0.9), ("C", 0.3, 1.5))
    }
    ours = "“DAF, 50 %” (1.20 × plain's step, 0.50 × its peak, gradient error 0)"
    turn = "× the peer's when these two are stepped in turn."
    assert said() == [f"{told['A']} beats {ours}."]
    assert said(duel("DAF, 50 %", "A", 1.1)) == [
        f"{told['A']} beats {ours}, whose step is 1.10 {turn}"
    ]
    # Not confirmed: it is said, and so is the next one.
    assert said(duel("DAF, 50 %", "A", 0.9)) == [
        f"{told['A']} seems to beat {ours}, whose step is 0.90 {turn}",
        f"{told['B']} beats {ours}.",
    ]
    # Its ratio to plain's hid it.
    hidden = [duel("DAF, 50 %", *each) for each in (("A", 0.9), ("B", 1.0), ("C", 1.3))]
    assert said(*hidden)[2:] == [f"{told['C']} beats {ours}, whose step is 1.30 {turn}"]
    # Another budget's row is not decided by it, nor by one that failed.
    failed = {**duel("DAF, 50 %", "A", 0.9), "failed": "killed"}
    del failed["ratio"]
    assert said(duel("DAF, 75 %", "A", 0.9), failed) == said()


def test_pairs_are_those_that_the_figures_compare() -> None:
    rows = [
        *(row("plain", 1.0, 1.0), row("slow", 0.3, 3.0), row("quick", 0.45, 1.5)),
        *(row("other", 0.2, 0.9, same_mathematics=False), row(BASELINE, 0.6, 2.4)),
        *(row("DAF, 50 %", 0.48, 1.1, "daf", percent=50), row("DAF, 2 bits", 0.4, 1.2, "daf")),
    ]
    assert pairs_of(rows) == [("DAF, 50 %", "quick"), ("DAF, 2 bits", BASELINE)]
    refused = {"workload": "w1", "contestant": "DAF, 50 %", "kind": "daf", "refused": "no plan"}
    assert pairs_of([*rows[:5], refused]) == []


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("when", ["prepare", "warming", "timed"])
def test_a_duel_that_one_refuses_has_no_ratio(
    who: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []

    class Contender:
        def __init__(self, way: Way) -> None:
            self.refuses, self.count = (way.amount == who) and when, 0

        def prepare(self) -> dict[str, Any]:
            return {"refusal": "no room"} if self.refuses == "prepare" else {}

        def step(self) -> dict[str, Any]:
            self.count += 1
            at = {"warming": 2, "timed": 5}.get(str(self.refuses))
            return {"raised": "no room"} if self.count == at else {"step_ms": 1.0}

        def end(self) -> None:
            ended.append(self)

    monkeypatch.setattr(peers_duel, "Contender", Contender)
    ways = [Way("w6", amount=float(index)) for index in (0, 1)]
    assert measure_duel(ways[0], ways[1], 6, None) == {"failed": "no room"}
    assert len(ended) == 2
    with pytest.raises(TooLateError):
        measure_duel(ways[0], ways[1], 6, time.monotonic())


def test_figures_compare_at_the_same_budget() -> None:
    rows = [
        *(row("plain", 1.0, 1.0), row("slow", 0.3, 3.0), row("quick", 0.45, 1.5)),
        *(row("other", 0.2, 0.9, same_mathematics=False), row(BASELINE, 0.6, 2.4)),
        *(row("DAF, 50 %", 0.48, 1.1, "daf", percent=50), row("DAF, 2 bits", 0.4, 1.2, "daf")),
    ]
    assert figures_of(rows) == {
        "w1_daf_peak_ratio": 0.48,
        "w1_daf_step_ratio": 1.1,
        "w1_best_peer_peak_ratio": 0.45,
        "w1_best_peer_step_ratio": 1.5,
        "w1_speed_vs_minmax_baseline": 2.0,
        "speed_vs_minmax_baseline": 2.0,
    }
    duels = [duel("DAF, 50 %", "quick", 0.8), duel("DAF, 2 bits", BASELINE, 0.4)]
    duels.append({**duel("DAF, 50 %", "slow", 0.0), "workload": "w2a"})  # another workload's
    assert figures_of([*rows, *duels]) == figures_of(rows) | {
        "w1_daf_vs_best_peer_step_ratio": 0.8,
        "w1_speed_vs_minmax_baseline": 2.5,
        "speed_vs_minmax_baseline": 2.5,
    }
    smallest = best_peer([rows[0], rows[4], rows[5]], 0.5)
    assert smallest is not None
    assert smallest["contestant"] == BASELINE  # none is within half


def test_an_unknown_workload_is_refused() -> None:
    ran = CliRunner().invoke(app, ["bench", "peers", "--workload", "W9"])
    assert ran.exit_code == 2
    assert "unknown workload 'W9'" in ran.stderr


@pytest.mark.thorough
def test_the_command_writes_json_page_and_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: Any
) -> None:
    asked: list[PeersJob] = []

    def run(job: PeersJob, *_: Any) -> Any:
        asked.append(job)
        return measured[0]

    monkeypatch.setattr(peers_job, "run", run)
    files = [tmp_path / name for name in ("a.json", "a.html", "a.png")]
    options = [("--out", files[0]), ("--report", files[1]), ("--picture", files[2])]
    words = [str(word) for option in options for word in option]
    ran = CliRunner().invoke(app, ["bench", "peers", "--quick", "--workload", "w1,W6", *words])
    assert ran.exit_code == 0, ran.output
    assert asked[0].workloads == ("w1", "w6")
    assert asked[0].minutes == peers_job.QUICK_MINUTES
    assert json.loads(files[0].read_text())["figures"] == measured[0].figures
    assert files[1].read_text().startswith("<!doctype html>")
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert "Where a peer wins" in ran.stdout


def test_the_least_budget_is_the_one_that_refusals_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_bytes: list[int] = []

    def beside(way: Way, *_: Any) -> dict[str, Any]:
        assert way.budget_bytes is not None
        asked_bytes.append(way.budget_bytes)
        if way.budget_bytes < 70:
            return {"refused": "too little", "least_bytes": way.budget_bytes + 30}
        return {"budget_bytes": way.budget_bytes, "step_ms": 2.0}

    plain = {"floor_bytes": 10, "peak_bytes": 110, "step_ms": 1.0}
    monkeypatch.setattr(peers_job._Workload, "_measure_plain", lambda _: plain)
    monkeypatch.setattr(peers_job, "measure_beside", beside)
    contestants = (replace(ours_at(LEAST), label="least"), ours_at(20))
    rows = peers_job.run(PeersJob(("w6",), contestants, sources=Sources(None))).rows
    assert asked_bytes == [10, 40, 70, 30]
    assert rows[1]["budget_bytes"] == 70
    assert rows[2]["least_bytes"] == 60  # of a share of plain's peak, the refusal is the row
