"""Both scripts of every host train the same, here at sizes of seconds."""

from __future__ import annotations

import copy
import gc
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from daf_bench.hosts import run
from daf_bench.hosts.catalogue import HOSTS, missing
from daf_bench.hosts.contestant import Contestant
from daf_bench.hosts.material import Shape, load_texts
from daf_bench.hosts.setting import Given, Setting
from daf_bench.workloads.sources import Sources
from torch import Tensor

from daf.memory import glibc, process_memory
from daf.session.session import Session

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
TINY = Shape(length=32, batch_size=16, layers=1, width=32, heads=2, vocabulary=256)
ROOM_BYTES = 150_000_000


def needs(host: str) -> None:
    if lacking := missing(host):
        pytest.skip(f"{', '.join(lacking)} not installed: the extra `hosts` has it")


def room() -> int:
    gc.collect()
    glibc.return_free_memory()
    return process_memory.resident_bytes() + ROOM_BYTES


def parameters(given: Given) -> Tensor:
    return torch.cat([each.detach().flatten() for each in given.model.parameters()])


def the_model() -> torch.nn.Module:
    pytest.importorskip("transformers", reason="the extra `hosts` has it")
    from daf_bench.hosts.material import make_model

    return make_model(TINY, 0)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Every session that ended."""
    found: list[Session] = []
    close = Session.close
    monkeypatch.setattr(Session, "close", lambda session: [found.append(session), close(session)])
    return found


# TRL's trainers, whose own tests train within a budget too, take long to begin.
EACH = [
    pytest.param(each, marks=[pytest.mark.thorough] * (each in ("sft", "dpo"))) for each in HOSTS
]


@pytest.mark.parametrize("host", EACH)
def test_a_host_trains_the_same_within_a_budget(
    host: str, tmp_path: Path, closed: list[Session]
) -> None:
    needs(host)
    model, texts = the_model(), load_texts(Sources(), TINY.vocabulary)
    plain = Given(model, texts, TINY, 2, TINY.batch_size, str(tmp_path))
    budget = room()
    ours = replace(plain, model=copy.deepcopy(model), budget=budget, options={"tolerance": 0})
    script, begun = import_module(f"daf_bench.hosts.scripts.{host}"), parameters(plain)
    script.plain(plain)
    script.budgeted(ours)
    moved = (parameters(plain) - begun).norm()
    assert moved > 0
    assert (parameters(ours) - parameters(plain)).norm() < 1e-3 * moved
    assert closed
    assert all(each.peak_bytes <= budget for each in closed)


@pytest.mark.skipif(not process_memory.peak_is_exact(), reason="asks the system for peaks")
def test_a_process_stops_between_updates_and_ends_with_its_host(tmp_path: Path) -> None:
    needs("own")
    child = Contestant(Setting("own", str(tmp_path), 2, is_small=True, batch_size=8))
    try:
        child.write_weights(tmp_path / "first")
        assert child.update()["ms"] > 0
        child.write_weights(tmp_path / "after")
        assert child.update()["peak_bytes"] > child.facts()["floor_bytes"] > 0
        assert child.finish()["finished"]
    finally:
        assert child.end() == 0
    first, after = ((tmp_path / name).read_bytes() for name in ("first", "after"))
    assert len(first) == len(after)
    assert first != after


@pytest.mark.thorough
@pytest.mark.skipif(not process_memory.peak_is_exact(), reason="asks the system for peaks")
def test_a_whole_comparison_and_its_rows_again(tmp_path: Path) -> None:
    needs("own")
    job = run.HostsJob(hosts=("own",), updates=2, pairs=6, most_pairs=6, is_small=True)
    job = replace(job, sources=Sources())
    result = run.run(job, tmp_path / "rows.jsonl")
    figures = result.figures
    assert figures["hosts"] == 1
    assert figures["mismatches"] == figures["failed"] == figures["refused"] == 0
    assert figures["moved_apart_worst"] < 1e-3
    exact, timed = result.rows
    assert 0 < exact["floor_bytes"] < exact["budget_bytes"] < exact["plain_peak_bytes"]
    assert all(ms > 0 for side in timed["ms"].values() for ms in side)
    assert all(row["peak_bytes"] > row["floor_bytes"] for row in result.rows)
    assert run.run(job, tmp_path / "rows.jsonl").rows == result.rows


def test_a_host_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "missing", lambda _: ["nothing_of_the_kind"])
    result = run.run(run.HostsJob(hosts=("sft",)))
    assert result.rows == [
        {"part": "skipped", "host": "sft", "reason": "nothing_of_the_kind not installed"}
    ]
    assert result.figures["skipped"] == 1
    assert result.figures["hosts"] == 0
