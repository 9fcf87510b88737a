"""``daf bench pressure``: a run whose budget is halved in mid-step, restored, then squeezed.

The run trains at 100 % of plain PyTorch's peak, inside a memory cgroup of that
size where the machine lets us make one. Then a second process joins the group
and allocates at a steady rate. Where no group can be made, the second process
is only simulated: a function given as the budget falls at the same rate, and
the result says so. A twin trains undisturbed, for the loss.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from daf_bench.harness import cgroup
from daf_bench.harness.result import BenchResult
from daf_bench.harness.subprocess_channel import Child, ContestantError
from daf_bench.main_job import default_data

# A step counts as restored once it takes no longer than this times the median before.
RESTORED = 1.1
# Of memory over time a result keeps the extremes of so many seconds each.
THINNED_S = 0.1
# A process that holds more and more: bytes per second, and how many in the end.
_GROW = """
import sys, time
rate, total = float(sys.argv[1]), int(sys.argv[2])
held, start = [], time.time()
print(start, flush=True)
while (size := sum(map(len, held))) < total:
    wanted = min(total, int(rate * (time.time() - start))) - size
    if wanted > 0:
        held.append(bytearray(b"x") * wanted)
    time.sleep(0.02)
print(time.time(), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class PressureJob:
    """What is run. The defaults are the full benchmark: W1 of the design.

    ``steps`` in each phase; the second process takes so much, at ``rate_bytes_per_s``, that the
    budget falls by ``squeezed_fraction`` of what plain holds above its floor.
    """

    data: str
    model: str = "resnet18"
    batch_size: int = 128
    steps: int = 12
    halved_to: float = 0.5
    squeezed_fraction: float = 0.5
    rate_bytes_per_s: float = 50e6
    seed: int = 0
    threads: int | None = None
    may_use_cgroup: bool = True


def full_job() -> PressureJob:
    """The full benchmark on the data at hand."""
    return PressureJob(default_data())


def quick_job() -> PressureJob:
    """The same on a small model within a few seconds: too short for its times to mean much."""
    return PressureJob("digits", "resnet20", batch_size=64, steps=3, halved_to=0.35)


class Trainee(Child):
    """A training process that is told what to do step by step."""

    def __init__(self, job: PressureJob, group: cgroup.LimitedGroup | None = None) -> None:
        super().__init__("daf_bench.memory.pressure_process", asdict(job), "the run", group=group)
        self.facts = self.ask("ready")


def run(job: PressureJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run the twin and the pressed run; a minute or so in full, seconds in quick form."""
    works, reason = cgroup.can_limit() if job.may_use_cgroup else (False, "not asked for")
    twin = Trainee(job)
    try:
        on_progress("plain, undisturbed")
        plain = [twin.ask("plain") for _ in range(job.steps)]
        floor, peak = twin.facts["floor_bytes"], max(step["peak_bytes"] for step in plain)
        with ExitStack() as stack:
            group = stack.enter_context(cgroup.limited_group(peak)) if works else None
            pressed = _Pressed(job, Trainee(job, group), group, (floor, peak), on_progress)
            pressed.carry_out()
        undisturbed = plain + [twin.ask("plain") for _ in pressed.steps[job.steps :]]
    finally:
        twin.end()
    figures = figures_of(job, pressed, [step["loss"] for step in undisturbed])
    notes = [
        f"{job.model}, {job.data.partition(':')[0]}, batch {job.batch_size}, {job.steps} steps "
        f"a phase, budget {peak} bytes (plain's peak), floor {floor} bytes",
        "memory cgroup of the budget's size, swap off; a second process takes the memory"
        if works
        else f"SIMULATED: the budget is a function that falls ({reason})",
    ]
    return BenchResult("pressure", pressed.rows(), figures, tuple(notes))


class _Pressed:
    """The run under pressure: its phases in turn, and what was seen."""

    def __init__(
        self,
        job: PressureJob,
        trainee: Trainee,
        group: cgroup.LimitedGroup | None,
        sizes: tuple[int, int],
        on_progress: Callable[[str], None],
    ) -> None:
        self._job, self._trainee, self._group = job, trainee, group
        self.floor_bytes, self.peak_bytes = sizes
        self._on_progress = on_progress
        self.steps: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.kills = 0
        self.lost_steps = 0
        self.squeeze: dict[str, float] = {}

    @property
    def simulated(self) -> bool:
        """Is there no second process?"""
        return self._group is None

    def carry_out(self) -> None:
        """All phases; a kill ends them and is counted."""
        try:
            self._phases()
            self.facts = self._trainee.ask("facts")
        except ContestantError:
            self.kills += int(self._trainee.end() == cgroup.KILLED_BY_SYSTEM)
            self.lost_steps += 1
        else:
            self._trainee.end()

    def _phases(self) -> None:
        above = self.peak_bytes - self.floor_bytes
        half = self.floor_bytes + int(self._job.halved_to * above)
        self._trainee.ask("budget", self.peak_bytes)
        self._several("full", self._job.steps)
        self._step("halved", "halve", half)
        self._several("halved", self._job.steps - 1)
        self._trainee.ask("budget", self.peak_bytes)
        self._several("restored", self._job.steps)
        with self._squeezing(self._squeezed_bytes(above)) as is_full:
            while not is_full():
                self._step("squeezing", "step")
            self._several("squeezed", self._job.steps)
        self._several("released", self._job.steps)

    def _squeezed_bytes(self, above: int) -> int:
        """What the second process takes.

        Pages of libraries that were loaded before are charged to another group, so that the group
        has room beyond the budget; that is taken too, or nothing would be felt.
        """
        wanted = int(self._job.squeezed_fraction * above)
        if self.simulated:
            return wanted
        return wanted + int(self._trainee.ask("most")["most_bytes"]) - self.peak_bytes

    def _several(self, phase: str, count: int) -> None:
        for _ in range(count):
            self._step(phase, "step")

    def _step(self, phase: str, command: str, *numbers: float) -> None:
        self._on_progress(f"{phase}: step {len(self.steps) + 1}")
        answer = self._trainee.ask(command, *numbers)
        if "lost" in answer:
            self.lost_steps += 1
        else:
            self.steps.append({"part": "step", "phase": phase, **answer})

    @contextmanager
    def _squeezing(self, total_bytes: int) -> Iterator[Callable[[], bool]]:
        """A second process in the group grows; or the budget falls as if there were one."""
        rate = self._job.rate_bytes_per_s
        if self._group is None:
            start_s = self._trainee.ask("simulate", rate, total_bytes)["start_s"]
            end_s = start_s + total_bytes / rate
            self.squeeze = {"start_s": start_s, "full_s": end_s, "bytes": total_bytes}
            yield lambda: time.time() >= end_s
            self.squeeze["end_s"] = self._trainee.ask("simulate", 0.0, 0)["start_s"]
            return
        with subprocess.Popen(
            [sys.executable, "-c", _GROW, str(rate), str(total_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=self._group.enter,
        ) as second:
            assert second.stdout is not None
            start_s = float(second.stdout.readline())
            full_s = start_s + total_bytes / rate
            self.squeeze = {"start_s": start_s, "full_s": full_s, "bytes": total_bytes}
            yield lambda: time.time() >= full_s
            self.squeeze["end_s"] = self.steps[-1]["end_s"]
            assert second.stdin is not None
            second.stdin.close()
        self.kills += int(second.returncode == cgroup.KILLED_BY_SYSTEM)

    def rows(self) -> list[dict[str, Any]]:
        """Steps, budgets and memory over time (seconds since the first step), and the squeeze."""
        rows = [*self.steps, {"part": "squeeze", "simulated": self.simulated, **self.squeeze}]
        rows += [{"part": "budget", **change} for change in self.facts.get("budgets", ())]
        samples = thinned(self.facts.get("samples", ()))
        rows += [{"part": "memory", "at_s": at, "resident_bytes": size} for at, size in samples]
        return rows


def thinned(samples: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The highest and the lowest sample of every ``THINNED_S``, in order."""
    found = []
    for _, group in itertools.groupby(samples, lambda sample: int(sample[0] / THINNED_S)):
        within = [(at, size) for at, size in group]
        lowest, highest = min(within, key=itemgetter(1)), max(within, key=itemgetter(1))
        found += sorted({lowest, highest})
    return found


def figures_of(job: PressureJob, pressed: _Pressed, undisturbed: list[float]) -> dict[str, float]:
    """The named numbers; see :class:`PressureJob`. Times are of the step that was halved."""
    losses = [step["loss"] for step in pressed.steps]
    figures: dict[str, float] = {
        "kills": pressed.kills,
        "lost_steps": pressed.lost_steps,
        "in_cgroup": int(not pressed.simulated),
    }
    halved = [step for step in pressed.steps if "asked_s" in step]
    if halved and pressed.facts:
        figures |= {
            "within_budget_ms": within_budget_ms(halved[0], pressed.facts["samples"]),
            "halved_step_ms": halved[0]["step_ms"],
            "pool_ms": halved[0]["acted_ms"],
            "steps_to_restore": steps_to_restore(pressed.steps),
        }
    last = min(job.steps, len(losses))
    if last:
        twin = undisturbed[len(losses) - last : len(losses)]
        figures["loss_ratio"] = statistics.fmean(losses[-last:]) / statistics.fmean(twin)
        figures["loss_noise"] = standard_error(twin) / statistics.fmean(twin)
    above = [step["peak_bytes"] > pressed.peak_bytes for step in pressed.steps]
    figures |= {"steps": len(losses), "steps_above_full_budget": sum(above)}
    figures["steps_above_steady_budget"] = steps_above_steady_budget(pressed.steps)
    return figures | _squeezed_to(pressed)


def standard_error(losses: list[float]) -> float:
    """Of the mean of an undisturbed run's last losses: what is noise, from step to step alone."""
    if len(losses) < 2:
        return 0.0
    return statistics.stdev(losses) / math.sqrt(len(losses))


def steps_above_steady_budget(steps: list[dict[str, Any]]) -> int:
    """Steps above a budget that had been in force since the step before."""
    return sum(
        step["peak_bytes"] > step["budget_bytes"] == before["budget_bytes"]
        for before, step in itertools.pairwise(steps)
    )


def _squeezed_to(pressed: _Pressed) -> dict[str, float]:
    """The budget's part above the floor that the second process left, of plain's peak above it."""
    budgets = [step["budget_bytes"] for step in pressed.steps if step["phase"] == "squeezed"]
    if not budgets:
        return {}
    above = pressed.peak_bytes - pressed.floor_bytes
    return {"squeezed_to": (min(budgets) - pressed.floor_bytes) / above}


def within_budget_ms(step: dict[str, Any], samples: list[tuple[float, int]]) -> float:
    """From asking for less until memory was last seen above it (0: never after that)."""
    above = [at for at, size in samples if at >= step["asked_s"] and size > step["asked_bytes"]]
    in_step = [at for at in above if at <= step["end_s"]]
    if any(at > step["end_s"] for at in above if at < step["end_s"] + 0.01):
        return float("inf")
    return 1000 * (max(in_step) - step["asked_s"]) if in_step else 0.0


def steps_to_restore(steps: list[dict[str, Any]]) -> float:
    """Steps after the budget's return until one is as fast as those before it was halved."""
    usual = statistics.median(step["step_ms"] for step in steps if step["phase"] == "full")
    restored = [step["step_ms"] for step in steps if step["phase"] == "restored"]
    fast = (place for place, ms in enumerate(restored) if ms <= RESTORED * usual)
    return float(next(fast, len(restored)))
