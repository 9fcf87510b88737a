"""The best plan, sought on a thread while training goes on under a quick one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from daf.errors import BudgetError
from daf.plan import Plan


class BackgroundPlan:
    """Runs ``make`` on a thread; ``result`` is there once it returned.

    A search that finds no plan leaves None: the quick plan in force stays.
    """

    def __init__(self, make: Callable[[], Plan]) -> None:
        self._make = make
        self._plan: Plan | None = None
        self._thread = threading.Thread(target=self._run, name="daf-planner", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> Plan | None:
        """The plan, if it is found within so long."""
        self._thread.join(seconds)
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
            self._plan = self._make()
        except BudgetError:
            self._plan = None
