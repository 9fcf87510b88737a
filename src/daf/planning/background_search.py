"""The best plans, sought on a thread while training goes on under a quick one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from daf.core.errors import BudgetError
from daf.core.plan import Plan


class BackgroundPlan:
    """Runs ``make`` on a thread; ``result`` is there once it returned: plans, the best one first.

    ``make`` is given a question that it asks now and then: is it to stop, with the best plans so
    far? A search that finds none leaves none: the quick plan in force stays.

    The interpreter waits for the thread when it ends: torn down under the solver's own threads, the
    process would abort. It is then told to stop.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], tuple[Plan, ...]]) -> None:
        self._make = make
        self._stop = threading.Event()
        self._plans: tuple[Plan, ...] = ()
        self.took_ms = 0.0  # of the processor, known once it is done
        self._thread = threading.Thread(target=self._run, name="daf-planner", daemon=False)
        self._thread.start()

    def stop(self) -> None:
        """Nobody waits for the result any more; returns at once."""
        self._stop.set()

    def wait(self, seconds: float) -> tuple[Plan, ...]:
        """The plans, if they are found within so long."""
        self._thread.join(seconds)
        return self.result

    def finish(self, seconds: float) -> tuple[Plan, ...]:
        """The same, but stopped after so long: afterwards nothing runs and nothing is held."""
        self._thread.join(seconds)
        self.stop()
        self._thread.join()
        return self.result

    @property
    def is_done(self) -> bool:
        """Has the search ended?"""
        return not self._thread.is_alive()

    @property
    def result(self) -> tuple[Plan, ...]:
        """The plans, if they were found by now."""
        return self._plans if self.is_done else ()

    def _must_stop(self) -> bool:
        return self._stop.is_set() or not threading.main_thread().is_alive()

    def _run(self) -> None:
        try:
            self._plans = self._make(self._must_stop)
        except BudgetError:
            self._plans = ()
        finally:
            self.took_ms = 1000.0 * time.thread_time()
