from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from daf.cli.display import LiveDisplay
from daf.cli.doctor import survey
from daf.core.step_report import StepReport
from daf.training.callbacks import StepRecord

Daf = Callable[..., Any]
SMALL = ("--batch-size", "32", "--threads", "1")


def test_a_plan_s_account_adds_up_and_leaves_nothing_behind(daf: Daf, workplace: Path) -> None:
    ran = daf("plan", "tiny_models:classifier", "--budget", "2GB", *SMALL, "--json")
    assert ran.code == 0, ran.err
    account = dict(ran.json["account"])
    predicted = account.pop("predicted_peak")
    assert sum(account.values()) == predicted <= 2 * 10**9
    numbers = 4 * 9 + 4 + 8 + 256 * 10 + 10  # convolution, norm, linear
    assert 0 <= account["gradients"] <= 4 * numbers  # those that exist when most is held
    assert account["optimizer_state"] == 4 * numbers  # momentum
    assert account["parameters"] == 4 * (numbers + 8) + 8  # running statistics and their count
    assert not (workplace / "runs").exists()


def test_a_plan_s_sites_are_treated_as_the_policy_says(daf: Daf) -> None:
    asked = ("plan", "tiny_models:classifier", "--budget", "2GB", *SMALL, "--json")
    coded = daf(*asked, "--bits", "2").json
    plain = daf(*asked, "--bits", "plain").json
    rows = {row["site"]: row for row in coded["sites"]}
    convolved = 4 * 32 * 4 * 8 * 8  # bytes of a batch of 32 after the convolution
    norm = rows["norm:batch_norm#0[0]"]
    assert (norm["method"], norm["bits"], norm["plain_bytes"]) == ("rotated", 2, convolved)
    assert convolved / 16 <= norm["held_bytes"] < convolved / 12
    relu = rows["<model>:relu#0[0]"]
    assert (relu["method"], relu["held_bytes"]) == ("mask", convolved // 32)
    assert {row["method"] for row in plain["sites"]} == {"keep"}
    held = sum(row["held_bytes"] for row in plain["sites"])
    # At the peak the program itself still holds some of them, and backward has read others.
    assert 0 < plain["account"]["saved"] <= held


def test_a_plan_says_what_was_left_alone_and_users_may_forbid_or_promise(daf: Daf) -> None:
    asked = ("plan", "tiny_models:classifier", "--budget", "2GB", *SMALL, "--json")
    (whole,) = [e for e in daf(*asked).json["left_alone"] if e["lever"] == "splitting"]
    assert "batch" in whole["reason"]  # statistics
    assert whole["saved_bytes"] >= 0
    allowed = (*asked, "--allow-batchnorm-split")
    levers = [each["lever"] for each in daf(*allowed).json["left_alone"]]
    assert "splitting" not in levers
    (forbidden,) = daf(*allowed, "--split", "never", "--operators", "pytorch").json["left_alone"]
    assert (forbidden["lever"], forbidden["reason"]) == ("splitting", "split=False was asked for")
    printed = daf(*asked[:-1]).out
    assert "left alone" in printed
    assert "would save" in printed
    for wrong in (("--split", "perhaps"), ("--operators", "mine")):
        ran = daf(*asked, *wrong)
        assert ran.code == 2
        assert "known: auto" in ran.json["error"]["message"]


def test_a_plan_refuses_as_training_does_and_its_least_budget_holds(daf: Daf) -> None:
    asked = ("tiny_models:classifier", *SMALL, "--json")
    refusal = daf("plan", *asked, "--budget", "20MB")
    assert refusal.code == 2
    assert refusal.json["error"]["kind"] == "BudgetError"
    # 10 % more, since two measurements of one process differ a little.
    enough = str(int(1.1 * refusal.json["error"]["least_bytes"]))
    least = daf("plan", *asked, "--budget", enough)
    assert least.code == 0 or least.json["error"]["least_bytes"] > int(enough)


def test_a_plan_is_printed_for_people(daf: Daf) -> None:
    ran = daf("plan", "tiny_models:classifier", "--budget", "2GB", *SMALL)
    for expected in ("plan:", "relu#0[0]", "floor", "optimizer state", "predicted peak", "2.00 GB"):
        assert expected in ran.out


@pytest.fixture
def floor_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """As if measured, which takes two processes (``test_commands``)."""
    monkeypatch.setattr("daf.cli.doctor.floor_above_torch_bytes", lambda: 5_400_000)
    return 5_400_000


def test_doctor_says_what_the_machine_is(daf: Daf, floor_bytes: int) -> None:
    facts = daf("doctor", "--json").json
    assert facts["floor_above_torch_bytes"] == floor_bytes
    assert facts["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert facts["processor"]["logical_cores"] == os.cpu_count()
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["threads"] == torch.get_num_threads()
    assert all(isinstance(works, bool) for works in facts["works"].values())
    people = daf("doctor").out
    for expected in ("instruction sets", "cores", torch.__version__, "mallopt", "clear_refs"):
        assert expected in people
    assert "5.40 MB above torch" in people


def test_doctor_says_what_auto_would_be_and_follows(daf: Daf, floor_bytes: int) -> None:
    memory = daf("doctor", "--json").json["memory"]
    assert 0 < memory["auto_budget_bytes"] < memory["total_bytes"]
    assert "left to others" in memory["auto_budget_reason"]
    assert all(Path(each).exists() for each in memory["pressure_files"])
    assert memory["auto_budget_reason"] in daf("doctor").out


def test_doctor_says_what_a_gpu_has_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"is_available": True, "device_count": 1}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    assert survey()["gpus"] == [{"name": "A GPU", "memory_bytes": 80, "spare_bytes": 42}]


def test_version(daf: Daf) -> None:
    assert daf("--version").out.strip() == metadata.version("daf-train")


def test_the_live_panel_shows_progress_and_memory_against_the_budget() -> None:
    screen = StringIO()
    display = LiveDisplay(Console(file=screen, force_terminal=True, width=120))
    display.begin(10, 0, 800_000_000)
    report = StepReport(0.1234, 50.0, 600_000_000, saved_bytes=0, micro_batch=32)
    display.stepped(StepRecord(10, 2, report, 640.0, 500_000_000, 87.5))
    display.end()
    for expected in ("step 10/10", "loss 0.1234", "87.5 %", "640 examples/s", "600 MB", "800 MB"):
        assert expected in screen.getvalue()
