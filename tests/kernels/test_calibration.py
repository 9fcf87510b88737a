"""Choosing among strategies, with a clock that is a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_strategies import COMPILING, NAMES, TABLES, Input, Machine

from daf.core.errors import KernelError
from daf.files.cache import kept
from daf.kernels.autotune import CALIBRATION_SECONDS, HOPELESS, MARGIN, Chooser, calibrate


def found_on(machine: Machine) -> dict[str, float]:
    return calibrate(NAMES, Input(machine), clock=machine.clock)


# --- first use ------------------------------------------------------------------------------


@given(TABLES)
def test_calibration_finds_the_fastest_within_the_limit(seconds) -> None:
    machine = Machine(seconds, warming=0.0)
    assert found_on(machine) == pytest.approx(seconds)
    once = sum(seconds.values())
    assert machine.now <= max(CALIBRATION_SECONDS + max(seconds.values()), once) * 1.000001
    assert {1 <= machine.ran.count(name) <= 32 for name in NAMES} == {True}


@given(TABLES)
def test_compiling_is_neither_a_sample_nor_within_the_limit(seconds) -> None:
    machine, compiled = Machine(seconds, compiling=COMPILING), Machine(seconds)
    assert found_on(machine) == pytest.approx(seconds)
    found_on(compiled)
    assert abs(len(machine.ran) - len(compiled.ran)) <= 1  # but for a run on the very limit
    assert machine.now == pytest.approx(compiled.now + 3 * COMPILING, abs=max(seconds.values()))


def test_a_fresh_device_does_not_choose_by_compile_times(tmp_path) -> None:
    """Every kind of run compiles for 0.6 s; the file has what they take afterwards."""
    path = tmp_path / "gpu.json"
    seconds = {"tree": 4e-4, "atomics": 9e-4, "hybrid": 2e-4}
    of_part = dict.fromkeys(NAMES, 1e-5)
    for machine in (
        Machine(seconds, compiling=COMPILING),
        Machine(seconds, of_part, compiling=COMPILING),
    ):
        path.unlink(missing_ok=True)
        chooser = Chooser("gpu", NAMES, tmp_path, machine.clock)
        assert chooser.choose("class", Input(machine)) == "hybrid"
        found = kept(tmp_path, "gpu")
        assert found is not None
        assert found["class"] == {"seconds": pytest.approx(seconds), "chosen": "hybrid"}


def test_large_inputs_are_chosen_for_within_the_limit_on_the_wall() -> None:
    """A processor's 128 M elements, of which a part is 1 M: one run of each would take 90 ms."""
    of_part = {"tree": 4e-5, "atomics": 6e-4, "hybrid": 3.9e-5}
    whole = {"tree": 0.0103, "atomics": 0.0685, "hybrid": 0.0105}
    machine = Machine(whole, of_part, warming=1e-5)  # as a processor does
    found = found_on(machine)
    assert machine.now <= CALIBRATION_SECONDS
    assert set(machine.ran) == {"tree", "hybrid"}
    assert min(found, key=found.__getitem__) == "tree"
    assert found["atomics"] > HOPELESS * found["tree"]


def test_where_time_is_over_after_the_part_the_part_decides() -> None:
    of_part = {"tree": 0.02, "atomics": 0.03, "hybrid": 0.01}
    machine = Machine(dict.fromkeys(NAMES, 2.0), of_part, warming=0.0)
    assert found_on(machine) == of_part
    assert machine.ran == []


@given(TABLES, TABLES, st.integers(2, 5000))
def test_the_limit_holds_but_for_one_run_slower_than_all_before(of_part, paces, growth) -> None:
    """Whoever ran on the whole is never beaten by a strategy that did not."""
    pace = {name: growth * (0.2 + each / 0.02) for name, each in paces.items()}  # 0.2 to 1.2
    small = {name: each / 50 for name, each in of_part.items()}
    machine = Machine({name: pace[name] * small[name] for name in NAMES}, small, warming=0.0)
    found = found_on(machine)
    longest = max(machine.seconds[name] for name in machine.ran)
    assert machine.now <= max(CALIBRATION_SECONDS, sum(small.values())) + longest
    for name in machine.ran:
        assert found[name] == pytest.approx(machine.seconds[name])
        others = [found[other] for other in set(NAMES) - set(machine.ran)]
        assert all(other >= found[name] * 0.999999 for other in others)


def test_who_did_not_run_on_the_whole_has_the_pace_of_the_slowest_that_did() -> None:
    of_part = {"tree": 1e-5, "atomics": 1.2e-5, "hybrid": 1.1e-5}
    machine = Machine({"tree": 0.016, "atomics": 0.05, "hybrid": 0.01}, of_part, warming=0.0)
    found = found_on(machine)
    assert set(machine.ran) == {"tree", "hybrid"}
    assert found["atomics"] == pytest.approx(1.2 * found["tree"])


def test_what_starting_takes_says_nothing_of_larger_inputs() -> None:
    """On a GPU a part is done as soon as it is started, which takes some strategies longer."""
    of_part = {"tree": 6e-5, "atomics": 2e-3, "hybrid": 1e-5}
    machine = Machine({"tree": 4e-4, "atomics": 0.3, "hybrid": 6e-4}, of_part)
    found = found_on(machine)
    assert min(found, key=found.__getitem__) == "tree"
    assert "atomics" not in machine.ran


def test_a_strategy_that_is_hopeless_is_run_on_a_part_only() -> None:
    machine = Machine({"tree": 1e-4, "atomics": 1e-3, "hybrid": 2e-4})
    found_on(machine)
    assert {name: machine.ran.count(name) for name in NAMES} == {
        "tree": 32,
        "atomics": 6,
        "hybrid": 32,
    }


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(KernelError, match="no strategies"):
        calibrate((), Input(Machine({})))


@pytest.mark.parametrize(("tree", "chosen"), [(1 + MARGIN / 2, "tree"), (1 + 2 * MARGIN, "hybrid")])
def test_the_usual_strategy_is_left_for_a_clear_margin_alone(tmp_path, tree, chosen) -> None:
    path = tmp_path
    machine = Machine({"tree": tree * 1e-3, "atomics": 5e-3, "hybrid": 1e-3})
    assert Chooser("one", NAMES, path).choose("class", Input(machine, "tree")) == chosen
    again = Machine(machine.seconds)
    assert Chooser("one", NAMES, path).choose("class", Input(again, "tree")) == chosen
    assert again.ran == []  # the file knows what was chosen, not only who was the fastest


# --- the file -------------------------------------------------------------------------------


def test_the_cache_file_serves_the_next_process_and_other_devices(tmp_path) -> None:
    path = tmp_path
    machine = Machine({"tree": 3.0, "atomics": 2.0, "hybrid": 1.0})
    assert Chooser("one", NAMES, path).choose("class", Input(machine)) == "hybrid"
    other = Machine({"tree": 1, "atomics": 2, "hybrid": 3})
    Chooser("two, 4 threads", NAMES, path).choose("class", Input(other))
    assert {each.stem for each in path.iterdir()} == {"one", "two-4-threads"}
    again = Machine(machine.seconds)
    assert Chooser("one", NAMES, path).choose("class", Input(again)) == "hybrid"
    assert again.ran == []
    fewer = Machine(machine.seconds)
    assert Chooser("one", ("tree", "atomics"), path).choose("class", Input(fewer)) == "atomics"
    assert fewer.ran != []


def test_a_broken_cache_file_is_told_of_and_replaced(tmp_path, caplog) -> None:
    (tmp_path / "one.json").write_text("{")
    chooser = Chooser("one", ("tree",), tmp_path)
    assert "measured anew" in caplog.text
    assert chooser.choose("class", Input(Machine({"tree": 1.0}))) == "tree"
    assert kept(tmp_path, "one") == {"class": {"seconds": {"tree": 1.0}, "chosen": "tree"}}
