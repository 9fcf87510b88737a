"""A search on a thread: what it finds, when it stops, and how the process ends beside it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

from synthetic import large

from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.planning import planner
from daf.planning.background_search import BackgroundPlan


def test_a_search_that_nobody_waits_for_is_told_to_stop() -> None:
    begun, told = threading.Event(), threading.Event()

    def search(must_stop: Callable[[], bool]) -> tuple[Plan, ...]:
        begun.set()
        while not must_stop():
            told.wait(0.01)
        told.set()
        raise BudgetError("stopped before anything was found")

    found = BackgroundPlan(search)
    assert begun.wait(30)
    assert not found.is_done
    found.stop()
    assert told.wait(30)
    assert found.wait(30) == ()
    assert found.is_done


def test_the_best_plans_come_first_and_only_once_the_search_is_over() -> None:
    measured = large(20)
    budget = planner.kept_peak_bytes(measured)
    plans = planner.make_plans((measured,), budget)
    release = threading.Event()
    found = BackgroundPlan(lambda _: plans if release.wait(30) else ())
    assert found.result == ()
    release.set()
    assert found.finish(30) == plans


def test_a_process_that_ends_beside_a_search_ends_well() -> None:
    """The solver has threads of its own, which must not be torn down while they run."""
    program = """
        import atexit
        import sys
        sys.path.insert(0, sys.argv[1])
        import planned
        from synthetic import large
        from daf.core.profile import Profiles
        from daf.planning.background_search import BackgroundPlan
        from daf.session import plan_selector
        from daf.session.plan_selector import PlanSelector
        from daf.planning import planner
        plan_selector.PATIENCE_S = 0.0
        measured = large(400)
        least = planned.least_budget(measured)
        budget = (least + planner.kept_peak_bytes(measured)) // 2
        own = PlanSelector(planner.Constraints())
        own.begin(Profiles(measured), budget)
        own.again(budget - 1, can_refuse=False)
        make, told = own._search._make, []

        def watched(must_stop):
            while not must_stop():  # until the main thread has ended
                pass
            told.append(True)
            return make(must_stop)

        own._search = BackgroundPlan(watched)
        print("searching")
        # Runs once the interpreter has waited for its threads.
        atexit.register(lambda: print("told to stop" if told else "torn down"))
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(program),
        str(Path(large.__code__.co_filename).parent),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "searching\ntold to stop\n"
