"""What a session's steps took and held: the counts that its reports and its state tell."""

from __future__ import annotations

from typing import Any

from daf.capture.capture import Capture
from daf.memory.domain import MemoryDomain
from daf.session.plan_autotuner import PlanAutotuner

_KEPT = ("step_index", "saved_bytes_plain", "saved_bytes_peak", "evicted_bytes")


class StepCounters:
    """Counts of all steps since a session, or the one that it resumes, began (bytes).

    ``saved_bytes_plain``: what plain PyTorch would have saved for the whole batch at its peak;
    ``saved_bytes_peak``: what was held instead; ``evicted_bytes``: planes that were given up.
    """

    def __init__(self, capture: Capture, memory: MemoryDomain) -> None:
        self._capture = capture
        self._memory = memory
        self.step_index = 0
        self.saved_bytes_plain = 0
        self.saved_bytes_peak = 0
        self.evicted_bytes = 0
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """The highest of the memory that a budget would bound."""
        return max(self._peak_bytes, self._memory.peak_bytes())

    def begin_peak(self) -> None:
        """From now on the memory's peak is a step's own."""
        self._peak_bytes = self.peak_bytes
        self._memory.reset_peak()

    def end_peak(self) -> int:
        """The peak since ``begin_peak``."""
        peak = self._memory.peak_bytes()
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def note_step(self, micro_batches: float) -> None:
        """One more, of so many micro-batches, ended."""
        self.step_index += 1
        plain = int(self._capture.stats.plain_peak_bytes * max(1.0, micro_batches))
        self.saved_bytes_plain = max(self.saved_bytes_plain, plain)
        self.evicted_bytes += self._capture.stats.evicted_bytes

    def note_held(self, autotuner: PlanAutotuner) -> None:
        """Of plans that are tried, what the one held for backward that stays."""
        if autotuner.trial is None:
            held_bytes = max(self.saved_bytes_peak, self._capture.stats.held_peak_bytes)
            self.saved_bytes_peak = autotuner.take_held_bytes() or held_bytes

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: getattr(self, name) for name in _KEPT} | {"peak_bytes": self.peak_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        for name in _KEPT:
            setattr(self, name, state[name])
        self._peak_bytes = state["peak_bytes"]
