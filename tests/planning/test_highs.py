"""The adapter around HiGHS, against answers found by hand or by looking at every choice."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daf.planning.highs import LinearProgram, Rows, Status

MANY = 100_000
NO_LOWER = -np.inf


def knapsack(columns: int, rows: int, seed: int = 0) -> LinearProgram:
    """As much value as fits into a third of the weight, in several dimensions."""
    numbers = np.random.default_rng(seed)
    weight = numbers.integers(1, 100, (rows, columns)).astype(np.float64)
    program = LinearProgram(-numbers.integers(1, 100, columns).astype(float), np.ones(columns))
    program.add_rows(Rows.of_dense(weight, lower=NO_LOWER, upper=weight.sum(axis=1) / 3))
    return program


def all_whole(program: LinearProgram) -> np.ndarray:
    return np.ones(len(program), dtype=np.bool_)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_fractions_and_whole_amounts() -> None:
    program = LinearProgram(np.array([-3.0, -2.0]), np.ones(2))
    program.add_rows(Rows([0, 0], [0, 1], [2.0, 2.0], lower=NO_LOWER, upper=3.0, count=1))
    fractions = program.solve(most_nodes=MANY)
    assert fractions.status is Status.SOLVED
    assert fractions.amounts is not None
    assert fractions.amounts.tolist() == [1.0, 0.5]
    assert fractions.objective == fractions.bound == -4.0
    whole = program.solve(whole=all_whole(program), most_nodes=MANY)
    assert whole.amounts is not None
    assert whole.amounts.tolist() == [1.0, 0.0]
    assert whole.objective == whole.bound == -3.0
    mixed = program.solve(whole=np.array([True, False]), most_nodes=MANY)
    assert mixed.amounts is not None
    assert mixed.amounts.tolist() == [1.0, 0.5]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 3))
def test_whole_amounts_are_the_best_of_all(seed: int, columns: int, rows: int) -> None:
    numbers = np.random.default_rng(seed)
    cost = numbers.integers(-9, 9, columns).astype(np.float64)
    matrix = numbers.integers(-5, 9, (rows, columns)).astype(np.float64)
    upper = numbers.integers(-4, 12, rows).astype(np.float64)
    program = LinearProgram(cost, np.ones(columns))
    program.add_rows(Rows.of_dense(matrix, lower=NO_LOWER, upper=upper))
    relaxed = program.solve(most_nodes=MANY)
    found = program.solve(whole=all_whole(program), most_nodes=MANY)
    choices = (np.array(each, dtype=float) for each in itertools.product((0, 1), repeat=columns))
    best = min((float(cost @ x) for x in choices if np.all(matrix @ x <= upper)), default=None)
    if best is None:
        assert found.status is Status.INFEASIBLE
        assert found.amounts is None
        return
    assert found.status is Status.SOLVED
    assert found.objective == pytest.approx(best, abs=1e-6)
    assert relaxed.objective <= found.bound + 1e-6 <= found.objective + 2e-6


def test_rows_may_come_in_any_order_and_be_empty() -> None:
    rows = Rows([2, 0, 2], [1, 0, 0], [7.0, 5.0, 0.5], lower=NO_LOWER, upper=[1, 2, 3], count=3)
    assert rows.start.tolist() == [0, 1, 1, 3]
    assert rows.column.tolist() == [0, 1, 0]
    assert rows.value.tolist() == [5.0, 7.0, 0.5]
    dense = Rows.of_dense(np.array([[5.0, 0.0], [0.0, 0.0], [0.5, 7.0]]), lower=0, upper=1)
    assert dense.start.tolist() == rows.start.tolist()
    assert dense.value.tolist() == [5.0, 0.5, 7.0]


def test_rows_added_and_tightened_between_solves_count() -> None:
    program = LinearProgram(np.array([-3.0, -2.0]), np.ones(2))
    assert program.solve(most_nodes=MANY).objective == -5.0
    first = program.add_rows(Rows([0, 0], [0, 1], 1.0, lower=NO_LOWER, upper=1.5, count=1))
    assert program.solve(most_nodes=MANY).objective == -4.0
    second = program.add_rows(Rows([0], [0], 1.0, lower=NO_LOWER, upper=0.5, count=1))
    assert (first, second) == (0, 1)
    assert program.solve(most_nodes=MANY).objective == -3.5
    program.bound_row(first, 1.0)
    assert program.solve(most_nodes=MANY).objective == -2.5
    assert program.solve(whole=all_whole(program), most_nodes=MANY).objective == -2.0


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e12, 1e18])
def test_costs_of_any_size_are_solved_and_told_as_they_were(size: float) -> None:
    program = LinearProgram(size * np.array([3.0, 2.0, 5.0]), np.ones(3))
    program.add_rows(Rows([0, 0, 0], [0, 1, 2], 1.0, lower=2.0, upper=3.0, count=1))
    answer = program.solve(whole=all_whole(program), most_nodes=MANY)
    assert answer.status is Status.SOLVED
    assert answer.amounts is not None
    assert answer.amounts.tolist() == [1.0, 1.0, 0.0]
    assert (answer.objective, answer.bound) == pytest.approx((5 * size, 5 * size))


@pytest.mark.parametrize("whole", [False, True])
def test_what_has_no_solution_is_infeasible(whole: bool) -> None:
    program = LinearProgram(np.ones(2), np.ones(2))
    program.add_rows(Rows([0, 0], [0, 1], 1.0, lower=3.0, upper=4.0, count=1))
    answer = program.solve(whole=all_whole(program) if whole else None, most_nodes=MANY)
    assert (answer.status, answer.amounts) == (Status.INFEASIBLE, None)


def test_infeasible_only_in_whole_amounts() -> None:
    program = LinearProgram(np.ones(1), np.ones(1))
    program.add_rows(Rows([0], [0], 1.0, lower=0.4, upper=0.6, count=1))
    assert program.solve(most_nodes=MANY).status is Status.SOLVED
    whole = program.solve(whole=all_whole(program), most_nodes=MANY)
    assert whole.status is Status.INFEASIBLE


def test_a_program_without_a_least_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="without an upper bound"):
        LinearProgram(np.array([1.0, -1.0]), np.array([np.inf, np.inf]))
    free = LinearProgram(np.array([1.0, 0.0]), np.array([np.inf, np.inf]))
    assert free.solve(most_nodes=MANY).objective == 0.0


def test_the_node_limit_stops_with_the_best_so_far_and_an_honest_bound() -> None:
    limited = knapsack(40, 8).solve(whole=np.ones(40, dtype=np.bool_), most_nodes=1)
    assert limited.status is Status.STOPPED
    assert limited.amounts is not None
    best = knapsack(40, 8).solve(whole=np.ones(40, dtype=np.bool_), most_nodes=MANY)
    assert best.status is Status.SOLVED
    assert limited.bound < best.objective <= limited.objective


def test_no_solution_at_the_node_limit_is_not_called_infeasible() -> None:
    numbers = np.random.default_rng(3)  # weights that must add up exactly: hard to meet
    weight = numbers.integers(10_000, 99_999, (4, 50)).astype(np.float64)
    total = np.floor(weight.sum(axis=1) / 2)
    program = LinearProgram(np.ones(50), np.ones(50))
    program.add_rows(Rows.of_dense(weight, lower=total, upper=total))
    answer = program.solve(whole=all_whole(program), most_nodes=1)
    assert (answer.status, answer.amounts) == (Status.STOPPED, None)
    assert answer.objective == np.inf
    assert 0 < answer.bound < np.inf


def test_the_gap_asked_for_is_kept() -> None:
    program = knapsack(40, 5)
    answer = program.solve(whole=all_whole(program), relative_gap=0.05, most_nodes=MANY)
    assert answer.status is Status.SOLVED
    assert answer.objective - answer.bound <= 0.05 * abs(answer.objective) + 1e-6


def test_the_same_program_gives_the_same_answer() -> None:
    first, second = (
        knapsack(60, 20).solve(whole=np.ones(60, dtype=np.bool_), most_nodes=20) for _ in range(2)
    )
    assert first.amounts is not None
    assert second.amounts is not None
    assert first.amounts.tobytes() == second.amounts.tobytes()
    assert (first.objective, first.bound) == (second.objective, second.bound)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        program = knapsack(40, 10, seed)
        program.solve(most_nodes=MANY)
        program.solve(whole=all_whole(program), most_nodes=50)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_no_thread_is_left_or_used() -> None:
    before, most = threads(), 0
    program = knapsack(60, 20)
    solving = threading.Thread(
        target=lambda: program.solve(whole=all_whole(program), most_nodes=50)
    )
    solving.start()
    while solving.is_alive():
        most = max(most, threads())
        time.sleep(0.001)
    solving.join()
    assert most <= before + 1  # the one that this test started
    patience_s = time.monotonic() + 5  # a joined thread's entry may outlive it for a moment
    while threads() > before and time.monotonic() < patience_s:
        time.sleep(0.01)
    assert threads() <= before


def test_other_threads_run_while_a_program_is_solved() -> None:
    program = knapsack(60, 20)
    solving = threading.Thread(
        target=lambda: program.solve(whole=all_whole(program), most_nodes=50)
    )
    solving.start()
    turns = 0
    while solving.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10  # with the interpreter's lock held throughout it would be one or two


def test_a_caller_who_uses_highs_with_threads_is_left_alone() -> None:
    def theirs() -> object:
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 2)
        highs.addVar(0.0, 1.0)
        return highs.run()

    def ours() -> object:
        program = knapsack(20, 3)
        return program.solve(whole=all_whole(program), most_nodes=MANY).status

    found: list[object] = []
    # HiGHS keeps one scheduler for each thread, which belongs to whoever solves there first.
    thread = threading.Thread(target=lambda: found.extend([ours(), theirs(), ours(), theirs()]))
    thread.start()
    thread.join()
    assert found == [Status.SOLVED, highspy.HighsStatus.kOk] * 2


def test_only_who_solves_a_program_imports_the_solver_and_it_says_nothing() -> None:
    script = (
        "import sys, daf, numpy as np\n"
        "from daf.planning import planner\n"
        "from daf.planning.highs import LinearProgram\n"
        "assert 'highspy' not in sys.modules\n"
        "LinearProgram(np.ones(1), np.ones(1)).solve(most_nodes=1)\n"
        "assert 'highspy' in sys.modules\n"
        "assert not {name for name in sys.modules if name.split('.')[0] == 'scipy'}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")
