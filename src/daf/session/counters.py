"""Counts of a session's steps, for its reports and its state."""

from typing import Any

from daf.capture.capture import Capture
from daf.core.json_dataclasses import Resumable
from daf.core.plan import Plan
from daf.core.step_report import StepReport
from daf.memory.domain import MemoryDomain
from daf.session.plan_autotuner import PlanAutotuner
from daf.step.gradient_release import GradientRelease


class StepCounters(Resumable):
    """Counts (bytes) of all steps since a session, or the one that it resumes, began.

    ``saved_bytes_plain``: plain PyTorch's peak for the whole batch; ``saved_bytes_peak``: ours.
    """

    KEPT = ("step_index", "saved_bytes_plain", "saved_bytes_peak", "evicted_bytes", "peak_bytes")

    def __init__(self, capture: Capture, memory: MemoryDomain, release: GradientRelease) -> None:
        self._capture, self._release = capture, release
        self.memory, self.step_index = memory, 0
        self.saved_bytes_plain, self.saved_bytes_peak = 0, 0
        self.evicted_bytes, self._peak_bytes = 0, 0
        self.loading_peak_bytes = memory.peak_bytes()  # before the session
        self._swapped_bytes = 0  # when the last step ended
        self.step_held_bytes = 0  # for backward, at the last step's peak
        self._step_evicted_bytes = self._released = 0

    @property
    def peak_bytes(self) -> int:
        """Highest use of the memory that a budget would bound."""
        return max(self._peak_bytes, self.memory.peak_bytes())

    @peak_bytes.setter
    def peak_bytes(self, value: int) -> None:
        self._peak_bytes = value

    def begin_peak(self) -> None:
        """Reset the memory's peak, so that it becomes one step's own."""
        self._peak_bytes = self.peak_bytes
        self.memory.reset_peak()

    def end_peak(self) -> int:
        """Return the peak since ``begin_peak``."""
        peak, self._swapped_bytes = self.memory.peak_and_swapped_bytes()
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def note_step(self, micro_batches: float) -> None:
        """Count one step of ``micro_batches`` micro-batches."""
        self.step_index += 1
        self._released = self._release.count.released
        stats = self._capture.stats
        self.step_held_bytes, self._step_evicted_bytes = stats.held_peak_bytes, stats.evicted_bytes
        plain = int(stats.plain_peak_bytes * max(1.0, micro_batches))
        self.saved_bytes_plain = max(self.saved_bytes_plain, plain)
        self.evicted_bytes += stats.evicted_bytes

    def note_held(self, autotuner: PlanAutotuner) -> None:
        """Count what the step held; after a trial of plans, only what the chosen plan held."""
        if autotuner.trial is None:
            held_bytes = max(self.saved_bytes_peak, self.step_held_bytes)
            self.saved_bytes_peak = autotuner.take_held_bytes() or held_bytes

    def report(
        self, loss: float, step_ms: float, plan: Plan, peak_bytes: int, **more: Any
    ) -> StepReport:
        """Return the report of the step noted last; ``more``: fields that are counted elsewhere."""
        held, evicted, swapped = self.step_held_bytes, self._step_evicted_bytes, self._swapped_bytes
        counted = (held, plan.micro_batch, evicted, self._released)
        return StepReport(loss, step_ms, peak_bytes, *counted, swapped_bytes=swapped, **more)
