"""Choosing among strategies, with a clock that is a table."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf.errors import KernelError
from daf.kernels.calibration import (
    CALIBRATION_SECONDS,
    CHECK_SHARE,
    CONFIRMATIONS,
    MARGIN,
    Chooser,
    calibrate,
)

NAMES = ("tree", "atomics", "hybrid")
SECONDS = st.floats(1e-6, 0.02)


class Machine:
    """Strategies that take what a table says; remembers what ran."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = dict(seconds)
        self.ran: list[str] = []

    def __call__(self, name: str) -> float:
        self.ran.append(name)
        return self.seconds[name]

    @property
    def spent(self) -> float:
        return sum(self.seconds[name] for name in self.ran)


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, SECONDS)))
def test_calibration_finds_the_fastest_within_the_limit(seconds) -> None:
    machine = Machine(seconds)
    assert calibrate(NAMES, machine) == seconds
    assert machine.spent <= max(CALIBRATION_SECONDS, sum(seconds.values())) * 1.000001
    assert {machine.ran.count(name) <= 10 for name in NAMES} == {True}


def test_a_first_run_that_compiles_does_not_count() -> None:
    calls: dict[str, int] = {}

    def run(name: str) -> float:
        calls[name] = calls.get(name, 0) + 1
        return 0.01 if calls[name] == 1 else {"tree": 0.001, "hybrid": 0.0005}[name]

    assert calibrate(("tree", "hybrid"), run) == {"tree": 0.001, "hybrid": 0.0005}


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(KernelError, match="no strategies"):
        calibrate((), Machine({}))


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, SECONDS)), st.integers(1, 3000))
def test_checks_take_a_small_share_of_the_time(seconds, calls) -> None:
    machine = Machine(seconds)
    chooser = Chooser("device", NAMES)
    chooser.choose("class", machine)
    machine.ran.clear()
    used = [chooser.choose("class", machine) for _ in range(calls)]
    useful = sum(seconds[name] for name in used) + min(seconds.values())
    assert machine.spent <= useful * CHECK_SHARE * 1.000001
    assert {seconds[name] for name in used} == {min(seconds.values())}


@given(st.permutations(NAMES), st.floats(1.1, 20.0))
def test_a_machine_that_changes_changes_the_choice(order, factor) -> None:
    first, second, third = order
    machine = Machine({first: 1e-4, second: 2e-4, third: 3e-4})
    chooser = Chooser("device", NAMES)
    assert chooser.choose("class", machine) == first
    machine.seconds[first] = 2e-4 * factor
    machine.ran.clear()
    limit = 200_000
    calls = next(call for call in range(limit) if chooser.choose("class", machine) == second)
    assert calls > 0
    assert machine.ran.count(second) >= CONFIRMATIONS


def test_noise_within_the_margin_never_flips() -> None:
    machine = Machine({"tree": 1e-3, "atomics": 5e-3, "hybrid": 1.001e-3})
    chooser = Chooser("device", NAMES)
    chooser.choose("class", machine)
    machine.seconds["hybrid"] = 1e-3 * (1 - MARGIN / 2)
    assert {chooser.choose("class", machine) for _ in range(5000)} == {"tree"}
    assert "hybrid" in machine.ran[30:]


def test_the_cache_file_serves_the_next_process_and_other_devices(tmp_path) -> None:
    path = tmp_path / "cache" / "reduce.json"
    machine = Machine({"tree": 3.0, "atomics": 2.0, "hybrid": 1.0})
    assert Chooser("one", NAMES, path).choose("class", machine) == "hybrid"
    Chooser("two", NAMES, path).choose("class", Machine({"tree": 1, "atomics": 2, "hybrid": 3}))
    assert set(json.loads(path.read_text())) == {"one", "two"}
    again = Machine(machine.seconds)
    assert Chooser("one", NAMES, path).choose("class", again) == "hybrid"
    assert again.ran == []
    fewer = Machine(machine.seconds)
    assert Chooser("one", ("tree", "atomics"), path).choose("class", fewer) == "atomics"
    assert fewer.ran != []


def test_a_broken_cache_file_is_told_of_and_replaced(tmp_path) -> None:
    path = tmp_path / "reduce.json"
    path.write_text("{")
    with pytest.warns(UserWarning, match="measuring anew"):
        chooser = Chooser("one", ("tree",), path)
    with pytest.warns(UserWarning, match="measuring anew"):
        assert chooser.choose("class", Machine({"tree": 1.0})) == "tree"
    assert json.loads(path.read_text()) == {"one": {"class": {"tree": 1.0}}}
