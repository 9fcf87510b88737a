"""When a run writes its next checkpoint: by steps, by time, and at the ends of epochs."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from daf.core.errors import UnitError

_DEFAULT_S = 600.0
_MOST_SHARE = 0.01  # of the time, that the default spends writing
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(steps?|s|min|h|)\s*")


def read_pace(text: str) -> str:
    """Return ``text`` if it is a pace such as 30s, 10min, 1h or 500steps, else raise UnitError."""
    _parsed(text)
    return text.strip()


def _parsed(text: str) -> tuple[int | None, float | None]:
    """Return (steps, None) or (None, seconds)."""
    match = _PATTERN.fullmatch(text)
    number, unit = match.groups() if match else ("0", "")
    if unit in _SECONDS and float(number) > 0:
        return None, float(number) * _SECONDS[unit]
    if unit not in _SECONDS and number.isdigit() and int(number) > 0:
        return int(number), None
    raise UnitError(
        f"cannot read --checkpoint-every {text!r}; give a time such as 30s, 10min or 1h, or whole "
        "steps such as 500steps"
    )


class CheckpointClock:
    """Tells when a checkpoint is due.

    ``every``: as ``read_pace``, obeyed as it is; None: ten minutes. Ends of epochs count beside it.
    By default checkpoints wait until what the last one took is at most 1 % of the time since.
    """

    def __init__(self, every: str | None) -> None:
        self._steps, self._seconds = (None, _DEFAULT_S) if every is None else _parsed(every)
        self._is_asked_for = every is not None
        self._written_s = time.monotonic()
        self._took_s = 0.0

    def is_due(self, step: int, *, ends_epoch: bool = False) -> bool:
        """True if a checkpoint is due after ``step``, counted from 1."""
        since_s = time.monotonic() - self._written_s
        by_steps = self._steps is not None and step % self._steps == 0
        by_time = self._seconds is not None and since_s >= self._seconds
        is_cheap = self._is_asked_for or self._took_s <= _MOST_SHARE * since_s
        return is_cheap and (by_steps or by_time or ends_epoch)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Measure the writing of a checkpoint inside."""
        start_s = time.monotonic()
        yield
        self._written_s = time.monotonic()
        self._took_s = self._written_s - start_s
