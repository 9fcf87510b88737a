"""Noise from the outside: ``daf plan`` tells it, ``daf train`` logs it and goes back if it must."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Daf = Callable[..., Any]
SMALL = ("--batch-size", "32", "--threads", "1")


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_plan_tells_the_noise_of_every_site_and_shows_the_worst(daf: Daf) -> None:
    asked = ("plan", "tiny_models:classifier", "--budget", "2GB", *SMALL, "--bits", "2")
    noise = daf(*asked, "--json").json["noise"]
    assert noise["is_measured"]
    assert noise["tolerance"] == 0.14
    found = [row["added_noise"] for row in noise["sites"]]
    assert found == sorted(found, reverse=True)
    assert sum(found) == pytest.approx(noise["added_noise"])
    assert noise["added_noise"] > 0.0
    sites = {row["site"]: row for row in noise["sites"]}
    assert sites["norm:batch_norm#0[0]"]["method"] == "rotated"
    assert sites["norm:batch_norm#0[0]"]["bits"] == 2
    shown = daf(*asked).out
    assert "of the batch's own gradient noise (measured), of at most 0.14" in shown
    assert noise["squared_bias"] is None  # a quarter of a quarter of 32 images is not coded
    assert "do not average out" not in shown
    assert noise["sites"][0]["site"] in shown


def test_a_plan_tells_errors_that_do_not_average_out(daf: Daf) -> None:
    asked = ("plan", "tiny_models:classifier", "--budget", "2GB", "--batch-size", "512")
    asked += ("--threads", "1", "--bits", "2")
    noise = daf(*asked, "--json").json["noise"]
    assert abs(noise["squared_bias"]) < 5 * noise["squared_bias_error"]
    assert f"± {noise['squared_bias_error']:.4f} are errors" in daf(*asked).out


def test_a_plan_that_adds_no_noise_says_none(daf: Daf) -> None:
    asked = ("plan", "tiny_models:classifier", "--budget", "2GB", *SMALL, "--bits", "exact")
    ran = daf(*asked, "--json")
    assert ran.json["noise"] is None
    assert "gradient noise" not in daf(*asked).out


def train(*more: str, model: str = "tiny_models:classifier", out: str = "run") -> tuple[str, ...]:
    settings = ("--budget", "2GB", "--bits", "1", "--max-steps", "9", *SMALL)
    return ("train", model, *settings, "--out", out, "--json", *more)


def test_a_run_logs_noise_and_leaves_its_sensitivities_for_the_next(daf: Daf) -> None:
    first = daf(*train())
    assert first.code == 0, first.err
    noise = first.json["noise"]
    assert noise["measurements"] >= 1
    assert noise["measured_ms"] > 0.0
    assert noise["added_noise"] == pytest.approx(sum(noise["by_site"].values()))
    for line in lines("run/metrics.jsonl"):
        assert line["added_variance"] / line["batch_variance"] > 0.0
    assert first.json["rollbacks"] == []

    again = daf(*train("--sensitivity", "run", out="again"))
    assert again.code == 0, again.err
    assert again.json["noise"]["measured_ms"] == 0.0
    stored = json.loads(Path("run/sensitivity.json").read_text())
    assert json.loads(Path("again/sensitivity.json").read_text()) == stored
    assert again.json["loss"] == first.json["loss"]

    other = daf(*train("--sensitivity", "nowhere.json", out="other"))
    assert other.code == 2
    assert other.json["error"]["kind"] == "DataError"
    assert not Path("other").exists()


def test_a_diverging_run_goes_back_and_goes_on_wider(daf: Daf) -> None:
    ran = daf(*train(model="tiny_models:diverges"))
    assert ran.code == 0, ran.err
    assert ran.json["rollbacks"] == [{"from_step": 5, "to_step": 1, "loss": None}]
    assert ran.json["policy"] == "2-bit"
    assert ran.json["finished"]
    assert [line["step"] for line in lines("run/metrics.jsonl")] == [*range(1, 10)]
    assert Path("run/checkpoint/good.safetensors").exists()
    # Up to the good state it was the run at one bit, from there on that of two.
    narrow = daf(*train("--max-steps", "1", out="narrow"))
    losses = [line["loss"] for line in lines("run/metrics.jsonl")]
    assert losses[0] == lines("narrow/metrics.jsonl")[0]["loss"]
    assert narrow.json["policy"] == "1-bit"


def test_a_run_that_may_not_go_back_stops(daf: Daf) -> None:
    ran = daf(*train("--no-rollback", model="tiny_models:diverges"))
    assert ran.code == 3
    assert ran.json["error"]["kind"] == "NonFiniteLossError"
    assert not Path("run/checkpoint/good.safetensors").exists()
