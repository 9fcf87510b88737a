"""Strategies that take what a table says, on a clock that only they move."""

from __future__ import annotations

from hypothesis import strategies as st

NAMES = ("tree", "atomics", "hybrid")
SECONDS = st.floats(1e-6, 0.02)
TABLES = st.fixed_dictionaries(dict.fromkeys(NAMES, SECONDS))
COMPILING = 0.6


class Machine:
    """Strategies that take what tables say, on a clock that only they move; remembers what ran.

    ``of_part`` makes the input one with a part. A first run of a strategy, on the part and on the
    whole, compiles. To warm up is to run, or takes ``warming``.
    """

    def __init__(
        self,
        seconds: dict[str, float],
        of_part: dict[str, float] | None = None,
        compiling: float = 0.0,
        warming: float | None = None,
    ) -> None:
        self.seconds, self.of_part = dict(seconds), of_part
        self.compiling, self.warming = compiling, warming
        self.now = 0.0
        self.ran: list[str] = []  # and timed
        self.ran_on_part: list[str] = []
        self.ran_to_warm_up: list[str] = []
        self._compiled: set[tuple[str, bool]] = set()

    def clock(self) -> float:
        return self.now

    def run(self, name: str, *, on_part: bool, timed: bool) -> float:
        taken = (self.of_part or {})[name] if on_part else self.seconds[name]
        if (name, on_part) not in self._compiled:
            self._compiled.add((name, on_part))
            taken += self.compiling
        self.now += taken
        kind = self.ran_on_part if on_part else self.ran
        (kind if timed else self.ran_to_warm_up).append(name)
        return taken

    @property
    def spent(self) -> float:
        return sum(self.seconds[name] for name in self.ran)


class Input:
    """A trial on that machine."""

    def __init__(
        self, machine: Machine, usual: str | None = None, *, is_part: bool = False
    ) -> None:
        self.machine, self._usual = machine, usual
        self._is_part = is_part

    def usual(self) -> str | None:
        return self._usual

    def warm_up(self, name: str) -> None:
        if self.machine.warming is None:
            self.machine.run(name, on_part=self._is_part, timed=False)
        else:
            self.machine.now += self.machine.warming

    def seconds(self, name: str) -> float:
        return self.machine.run(name, on_part=self._is_part, timed=True)

    def part(self) -> Input:
        if self._is_part or self.machine.of_part is None:
            return self
        return Input(self.machine, self._usual, is_part=True)
