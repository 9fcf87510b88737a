"""The best plan, sought on a thread while training goes on under a quick one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from daf.errors import BudgetError
from daf.plan import Plan


class BackgroundPlan:
    """Runs ``make`` on a thread; ``result`` is there once it returned.

    ``make`` is given a question that it asks now and then: is it to stop, with the best plan so
    far? A search that finds no plan leaves None: the quick plan in force stays.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Plan]) -> None:
        self._make = make
        self._stop = threading.Event()
        self._plan: Plan | None = None
        self._thread = threading.Thread(target=self._run, name="daf-planner", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> Plan | None:
        """The plan, if it is found within so long."""
        self._thread.join(seconds)
        return self.result

    def finish(self, seconds: float) -> Plan | None:
        """The same, but stopped after so long: afterwards nothing runs and nothing is held."""
        self._thread.join(seconds)
        self._stop.set()
        self._thread.join()
        return self.result

    @property
    def is_done(self) -> bool:
        """Has the search ended?"""
        return not self._thread.is_alive()

    @property
    def result(self) -> Plan | None:
        """The plan, if it was found by now."""
        return self._plan if self.is_done else None

    def _run(self) -> None:
        try:
            self._plan = self._make(self._stop.is_set)
        except BudgetError:
            self._plan = None
