"""A search for better plans on a thread, while training runs under a quick plan."""

import threading
import time
from collections.abc import Callable

from daf.core.errors import BudgetError
from daf.core.plan import Plan


class BackgroundPlan:
    """A thread that runs ``make``; ``result`` holds its plans, best first, once it ended.

    ``make`` receives a function that is True once it must return its best plans so far. At exit the
    interpreter joins the thread: torn down under the solver's threads, the process would abort.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], tuple[Plan, ...]]) -> None:
        self._make = make
        self._stop = threading.Event()
        self._plans: tuple[Plan, ...] = ()
        self.took_ms = 0.0  # processor time, set once the search ended
        self._thread = threading.Thread(target=self._run, name="daf-planner", daemon=False)
        self._thread.start()

    def stop(self) -> None:
        """Tell the search to stop; return at once."""
        self._stop.set()

    def wait(self, seconds: float) -> tuple[Plan, ...]:
        """Return the plans if the search ends within ``seconds``, else none."""
        self._thread.join(seconds)
        return self.result

    def finish(self, seconds: float) -> tuple[Plan, ...]:
        """Stop the search after ``seconds``, join its thread and return its plans."""
        self._thread.join(seconds)
        self.stop()
        self._thread.join()
        return self.result

    @property
    def is_done(self) -> bool:
        """True if the search has ended."""
        return not self._thread.is_alive()

    @property
    def result(self) -> tuple[Plan, ...]:
        """The plans found, best first; empty while the search runs."""
        return self._plans if self.is_done else ()

    def _run(self) -> None:
        main, stop = threading.main_thread(), self._stop
        try:
            self._plans = self._make(lambda: stop.is_set() or not main.is_alive())
        except BudgetError:
            self._plans = ()
        finally:
            self.took_ms = 1000.0 * time.thread_time()
