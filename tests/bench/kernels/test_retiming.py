"""Choices checked while running, with a clock that is a table; what the benchmark says of them."""

from __future__ import annotations

import pytest
import torch
from daf_bench.kernels import varying_reductions as varying
from daf_bench.kernels.reductions import whole
from daf_bench.kernels.retiming import CHECK_SHARE, CONFIRMATIONS, RetimingChooser
from daf_bench.kernels.varying_reductions import ALONE, BUSY, Phase, VaryingJob
from hypothesis import given
from hypothesis import strategies as st
from made_up_strategies import COMPILING, NAMES, TABLES, Input, Machine

from daf.kernels.autotune import MARGIN


@given(TABLES, st.integers(1, 3000))
def test_checks_take_a_small_share_of_the_time(seconds, calls) -> None:
    machine = Machine(seconds)
    chooser = RetimingChooser("device", NAMES, clock=machine.clock)
    chooser.choose("class", Input(machine))
    began = machine.now
    used = [chooser.choose("class", Input(machine)) for _ in range(calls)]
    useful = sum(seconds[name] for name in used) + min(seconds.values())
    assert machine.now - began <= useful * CHECK_SHARE * 1.000001
    assert {seconds[name] for name in used} == {min(seconds.values())}


@given(st.permutations(NAMES), st.floats(1.1, 20.0))
def test_a_machine_that_changes_changes_the_choice(order, factor) -> None:
    first, second, third = order
    machine = Machine({first: 1e-4, second: 2e-4, third: 3e-4})
    chooser = RetimingChooser("device", NAMES)
    assert chooser.choose("class", Input(machine)) == first
    machine.seconds[first] = 2e-4 * factor
    machine.ran.clear()
    limit = 400_000
    trial = Input(machine)
    calls = next(call for call in range(limit) if chooser.choose("class", trial) == second)
    assert calls > 0
    assert machine.ran.count(second) >= CONFIRMATIONS


def test_noise_within_the_margin_never_flips() -> None:
    machine = Machine({"tree": 1e-3, "atomics": 5e-3, "hybrid": 1.001e-3})
    chooser, trial = RetimingChooser("device", NAMES), Input(machine)
    chooser.choose("class", trial)
    machine.seconds["hybrid"] = 1e-3 * (1 - MARGIN / 2)
    machine.ran.clear()
    assert {chooser.choose("class", trial) for _ in range(10_000)} == {"tree"}
    assert "hybrid" in machine.ran


def test_who_finds_the_input_in_a_cache_does_not_win_by_that() -> None:
    class Cached(Input):
        """Whoever goes second in a check takes half as long."""

        def seconds(self, name: str) -> float:
            return super().seconds(name) / (1 + (len(self.machine.ran) - 1) % 2)

    machine = Machine(dict.fromkeys(NAMES, 1e-3))
    chooser, trial = RetimingChooser("device", NAMES), Input(machine)
    chosen = chooser.choose("class", trial)
    machine.ran.clear()
    assert {chooser.choose("class", Cached(machine)) for _ in range(20_000)} == {chosen}
    assert len(machine.ran) >= 4 * CONFIRMATIONS


def test_a_check_in_another_process_does_not_take_compiling_for_slowness(tmp_path) -> None:
    path = tmp_path
    seconds = {"tree": 1e-3, "atomics": 3e-3, "hybrid": 1.5e-3}
    RetimingChooser("gpu", NAMES, path).choose("class", Input(Machine(seconds)))
    machine = Machine(seconds | {"tree": 4e-3}, compiling=COMPILING)
    chooser, trial = RetimingChooser("gpu", NAMES, path), Input(machine)
    calls = 10 * round(CONFIRMATIONS / CHECK_SHARE)
    assert [chooser.choose("class", trial) for _ in range(calls)][-1] == "hybrid"


# --- the benchmark --------------------------------------------------------------------------


def test_every_way_takes_turns_through_every_phase_and_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    phases = (Phase(1, ALONE), Phase(2, BUSY))
    result = varying.run_varying(VaryingJob((whole(2**16),), phases, 0.05, "cpu"))
    assert torch.get_num_threads() == threads
    assert [(row["threads"], row["load"]) for row in result.rows] == [(1, ALONE), (2, BUSY)]
    for row in result.rows:
        assert set(row["ratios"]) == {"kept", "retimed", "rule", "torch"}
        assert row["ratios"]["kept"] == 1
        assert row["rounds"] >= 4
        assert row["last_strategy"]["torch"] == "pytorch"
    assert result.figures == varying.varying_figures(result.rows)


def test_figures_say_if_timing_again_pays() -> None:
    def row(retimed: float, changed: int = 1) -> dict[str, dict[str, float]]:
        return {"ratios": {"retimed": retimed, "torch": 2.0}, "strategies": {"retimed": changed}}

    found = varying.varying_figures([row(0.8, 2), row(1.25)])
    assert found == {
        "retimed_vs_kept": pytest.approx(1.0),
        "retimed_vs_kept_best": 0.8,
        "retimed_vs_kept_worst": 1.25,
        "kept_vs_torch": pytest.approx(0.5),
        "strategies_changed": 1.0,
        "is_worthwhile": 0.0,
    }
    assert varying.varying_figures([row(0.9), row(0.9)])["is_worthwhile"] == 1.0
