"""A run from its first step, or its checkpoint, to its summary."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from daf.core.errors import DataError, NonFiniteLossError, PlatformError, RunFolderError
from daf.core.step_report import StepReport
from daf.core.units import format_bytes
from daf.files.records import Extent, GrowingFile, extent_of, read_lines, write_json
from daf.memory.allocation_log import recorded
from daf.memory.recycling_allocator import unsupported_reason
from daf.step.gradient import is_finite
from daf.training.callbacks import Observer, StepRecord
from daf.training.checkpoint_clock import CheckpointClock
from daf.training.job import TrainingJob, checked_device, make_job
from daf.training.memory_log import MemoryLog
from daf.training.run_folder import RunFolder
from daf.training.settings import TrainSettings
from daf.training.summary import summarize, write_plan_records
from daf.training.task import TalliedLoss

HISTORY_STEP = 2  # from 0: the first after the plan has settled and optimizer state exists


def train(
    settings: TrainSettings, out: Path, observer: Observer, *, resume: bool = False
) -> dict[str, Any]:
    """Train as ``settings`` say, leave the run in ``out``, and return its summary.

    A first SIGINT or SIGTERM stops after the step in progress and leaves a checkpoint; the summary
    then has ``"finished": False``. A killed run loses what it did since its last checkpoint. The
    summary's ``warnings`` are sentences on what a resumed run found damaged.

    Raises:
        BudgetError: the budget cannot hold the job; nothing is left in ``out``.
        PlatformError: ``settings.history``, where allocations cannot be redirected.
        NonFiniteLossError: the last good weights are in ``out``.
        RunFolderError: ``out`` cannot be written, another process trains in it, or it is not what
            ``resume`` needs.
        KeyboardInterrupt: a second signal, or a first one before the first checkpoint.
    """
    _refuse_without_records(settings)
    folder = RunFolder(out)
    try:
        with InterruptWatch() as watch, folder.held(resumes=resume):
            job = make_job(settings, folder.good_state)
            session = job.session
            with session, MemoryLog(settings.memory_interval_ms, session.held_bytes) as memory:
                run = _Run(job, folder, observer, watch, memory)
                run.restore() if resume else run.prepare()
                return run.carry_out()
    finally:
        observer.end()


def _refuse_without_records(settings: TrainSettings) -> None:
    reason = unsupported_reason()
    if checked_device(settings.device).type != "cpu":
        reason = f"the processor's allocations are recorded, and this run is on {settings.device}"
    if settings.history and reason is not None:
        raise PlatformError(f"asked to record a step's memory: {reason}; leave --history out")


@dataclass(eq=False)
class _Run:
    job: TrainingJob
    folder: RunFolder
    observer: Observer
    watch: "InterruptWatch"
    memory: MemoryLog
    _step: int = 0
    _evaluations: list[dict[str, Any]] = field(default_factory=list)
    _rollbacks: list[dict[str, Any]] = field(default_factory=list)
    _reported_refusal: str = ""
    _reported_s: float = -math.inf  # of the last change of the budget
    _warnings: list[str] = field(default_factory=list)
    _kept: tuple[int, int] | None = None  # steps and evaluations in the last checkpoint
    _is_resumed: bool = False

    def __post_init__(self) -> None:
        self._loss = TalliedLoss(self.job.task, self.job.session)
        self._clock = CheckpointClock(self.job.settings.checkpoint_every)
        all_steps = self.job.order.steps_per_epoch * self.job.settings.epochs
        limit = self.job.settings.max_steps
        self._total_steps = all_steps if limit is None else min(all_steps, limit)

    def prepare(self) -> None:
        """Plan a new run."""
        self.memory.mark("profile")
        plan = self.job.session.prepare(self.job.train_batch(0), self._loss, self._profiling)
        known = " (from an earlier run)" if self.job.session.began_warm else ""
        self.observer.note(f"plan{known}: {plan.reason}")
        self.folder.begin(self.job.settings)
        write_plan_records(self.job, self.folder)

    def _profiling(self, policy_name: str) -> None:
        if self.watch.requested:
            raise KeyboardInterrupt
        self.observer.profiling(policy_name)

    def restore(self) -> None:
        """Restore the folder's last whole checkpoint; nothing is measured or planned again."""
        self._is_resumed = True
        state, trouble = self.folder.read_state(self.job.model, self.job.optimizer)
        try:
            self.job.session.load_state_dict(state["session"])
            self._step = state["step"]
            self._evaluations = state["evaluations"]
            self._rollbacks = state["rollbacks"]
            logged = max((line["step"] for line in read_lines(self.folder.metrics)), default=0)
            lost = self.folder.cut_logs(state["logs"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(
                f"{self.folder.checkpoint} cannot be resumed: {error!r}"
            ) from error
        if trouble:
            self._warn(f"{trouble}, after step {self._step}")
        for sentence in lost:
            self._warn(sentence)
        if logged > self._step:
            self._warn(
                f"steps {self._step + 1} to {logged} were made after the last whole checkpoint, "
                "and are made again"
            )
        lost_steps = self.folder.evaluated_steps() - {each["step"] for each in self._evaluations}
        if lost_steps and not trouble:
            steps = sorted(lost_steps)
            self._warn(f"evaluations after steps {steps} are lost: {self.folder.checkpoint} is old")
        if self.job.session.plan is not None:
            self.observer.note(f"plan: {self.job.session.plan.reason}")

    def _warn(self, sentence: str) -> None:
        self._warnings.append(sentence)
        self.observer.note(sentence)

    def carry_out(self) -> dict[str, Any]:
        """Train until the last step or a signal; write weights and summary."""
        self._report_conditions()
        self.memory.write_to(self.folder)
        self.memory.mark("train")
        self.job.model.train()
        self.job.session.noise.tell = self.observer.note
        self._metrics = GrowingFile(self.folder.metrics)
        try:
            if not self._is_resumed:
                self._checkpoint()
            self._steps_and_evaluations()
            return self._finish()
        except NonFiniteLossError as error:
            raise NonFiniteLossError(f"{error}; {self._keep_good_weights()}") from error
        finally:
            self._metrics.close()

    def _report_conditions(self) -> None:
        for sentence in self.job.left_out:
            self._warn(f"left out: {sentence}")
        for setting in self.job.session.settings:
            self.observer.note(f"while this runs: {setting}")
        for refused in self.job.session.left_alone():
            if refused.lever != "fusion" or not refused.modules:  # the plan tells of each place
                self.observer.note(f"left alone: {refused}")
        if self.job.order.left_out_per_epoch:
            self.observer.note(
                f"each epoch leaves out {self.job.order.left_out_per_epoch} examples, others each "
                "time, so that every batch is whole"
            )
        self.observer.begin(self._total_steps, self._step, self.job.session.budget_bytes)

    def _steps_and_evaluations(self) -> None:
        while not self.watch.requested:
            if self._evaluation_is_due():
                self._evaluate()
            elif self._step < self._total_steps:
                self._train_step()
            else:
                return

    def _train_step(self) -> None:
        start_s = time.perf_counter()
        batch = self.job.train_batch(self._step)
        self.job.task.tally.take_percent()
        with self._recording():
            report = self.job.session.step(batch, self._loss)
        if report.rolled_back_to is not None:
            self._go_back(report)
            return
        elapsed_s = time.perf_counter() - start_s
        record = StepRecord(
            self._step + 1,
            self._step // self.job.order.steps_per_epoch + 1,
            report,
            examples_per_s=self.job.settings.batch_size / elapsed_s,
            resident_bytes=self.job.session.held_bytes(),
            accuracy_percent=self.job.task.tally.take_percent(),
            budget_changes=self._budget_changes(),
        )
        self._report_release(report)
        self._step += 1
        self._log(record)

    def _go_back(self, report: StepReport) -> None:
        assert report.rolled_back_to is not None
        loss = report.loss if math.isfinite(report.loss) else None
        self._rollbacks.append(
            {"from_step": self._step + 1, "to_step": report.rolled_back_to, "loss": loss}
        )
        self._step = report.rolled_back_to
        self._evaluations = [each for each in self._evaluations if each["step"] <= self._step]
        self._metrics.close()
        self.folder.keep_metrics_until(self._step)
        self._metrics = GrowingFile(self.folder.metrics)
        self._checkpoint()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        due = min(HISTORY_STEP, self._total_steps - 1)
        if not self.job.settings.history or self._step != due:
            yield
            return
        with recorded(self.job.model) as history:
            yield
        history.write(self.folder.history)

    def _report_release(self, report: StepReport) -> None:
        refusal = self.job.session.release_refusal
        if refusal and refusal != self._reported_refusal:
            self.observer.note(f"gradients are not released: {refusal}")
        self._reported_refusal = refusal
        if report.overrun_bytes:
            self.observer.note(
                f"step {self._step + 1} had begun to update parameters and needed "
                f"{format_bytes(report.overrun_bytes)} beyond the budget to finish"
            )

    def _budget_changes(self) -> tuple[dict[str, Any], ...]:
        """Return the budget's changes since the last call; the first budget is no change."""
        history = self.job.session.budget_history
        new = [each for each in history if each.time_s > self._reported_s]
        moved = math.isfinite(self._reported_s)
        self._reported_s = history[-1].time_s
        changes = [
            asdict(each) | {"time_s": self.memory.note_budget(each.time_s, each.budget_bytes)}
            for each in new
        ]
        return tuple(changes if moved else changes[1:])

    def _log(self, record: StepRecord) -> None:
        self._metrics.append([record.as_dict()])
        self.observer.stepped(record)
        self.memory.flush_if_old()
        if self._clock.is_due(self._step):
            self._checkpoint()

    def _evaluation_is_due(self) -> bool:
        ends_epoch = self._step % self.job.order.steps_per_epoch == 0
        done = bool(self._evaluations) and self._evaluations[-1]["step"] == self._step
        has_any = self._step > 0 and self.job.task.test_examples > 0
        return has_any and not done and (ends_epoch or self._step == self._total_steps)

    def _evaluate(self) -> None:
        self.memory.mark("evaluate")
        if (metric := self._metric()) is None:
            return
        epoch = -(-self._step // self.job.order.steps_per_epoch)
        self._evaluations.append({"step": self._step, "epoch": epoch, "metric": metric})
        self.observer.note(f"epoch {epoch}: {self.job.task.metric_name} {metric:.4g}")
        if self._clock.is_due(self._step, ends_epoch=True):
            self._checkpoint()
        self.memory.mark("train")

    def _metric(self) -> float | None:
        """Return the metric over all test examples; None without any, or if a signal came first."""
        total = weight = 0.0
        self.job.optimizer.zero_grad()  # evaluation needs their room; the next step makes its own
        plan, task = self.job.session.plan, self.job.task
        batch_size = plan.micro_batch if plan else self.job.settings.batch_size
        self.job.model.eval()
        try:
            # Half of it: without codes, forward holds several whole outputs at once.
            for indices in self.job.test_indices(max(1, batch_size // 2)):
                if self.watch.requested:
                    return None
                found = self.job.session.evaluate(
                    torch.from_numpy(indices),
                    lambda model, part: task.score(model, self.job.test_batch(part.numpy())),
                )
                try:
                    added, added_weight = map(float, found)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise DataError(
                        "asked Task.score for the sum of test examples' scores and their weight; "
                        f"found a {type(found).__name__}; return two numbers"
                    ) from error
                total, weight = total + added, weight + added_weight
        finally:
            self.job.model.train()
        task.test_examples *= bool(weight)  # where none counts, none is asked again
        return task.metric(total / weight) if weight else None

    def _checkpoint(self) -> None:
        if not is_finite(self.job.model.state_dict()):
            raise NonFiniteLossError(
                f"the weights became inf or NaN at or before step {self._step} while the loss was "
                "still finite; try a lower learning rate"
            )
        state = {
            "step": self._step,
            "evaluations": self._evaluations,
            "rollbacks": self._rollbacks,
            "session": self.job.session.state_dict(),
            "logs": self._sync_logs(),
        }
        with self._clock.writing():
            self.folder.write_state(self.job.model, self.job.optimizer, state)
        self._kept = self._step, len(self._evaluations)

    def _sync_logs(self) -> dict[str, Extent]:
        logs = ((self.folder.metrics, self._metrics), (self.folder.memory, self.memory))
        return {path.name: log.sync() for path, log in logs}

    def _keep_good_weights(self) -> str:
        """After a non-finite loss, write the last finite weights; return which they are."""
        if is_finite(self.job.model.state_dict()):
            self.folder.write_weights(self.job.model)
            return f"{self.folder.weights} holds the weights after {self._step} whole steps"
        step = self.folder.read_weights(self.job.model)
        self.folder.write_weights(self.job.model)
        return (
            f"the weights were not finite any more, so {self.folder.weights} holds those of the "
            f"last checkpoint, after step {step}"
        )

    def _finish(self) -> dict[str, Any]:
        finished = self._step >= self._total_steps and not self._evaluation_is_due()
        if self._kept != (self._step, len(self._evaluations)):
            self._checkpoint()
        self.folder.write_weights(self.job.model)
        if self.job.session.sensitivity is not None:
            write_json(self.folder.sensitivity, self.job.session.sensitivity.as_dict())
        write_plan_records(self.job, self.folder)
        summary = self._summary(finished=finished)
        write_json(self.folder.summary, summary)
        return summary

    def _summary(self, *, finished: bool) -> dict[str, Any]:
        keys = ("step", "loss", "step_ms", "examples_per_s")
        rows = [tuple(line[key] for key in keys) for line in read_lines(self.folder.metrics)]
        if [step for step, *_ in rows] != list(range(1, self._step + 1)):
            self._warn(
                f"{self.folder.metrics} holds {len(rows)} whole lines of {self._step} steps, or "
                "not in order; loss and speed are of those"
            )
        logs = self._sync_logs() | {self.folder.sites.name: extent_of(self.folder.sites)}
        counted = summarize(self.job, self._step, rows, self._evaluations, finished=finished)
        return counted | {
            "rollbacks": self._rollbacks,
            "warnings": self._warnings,
            "logs": {name: list(extent) for name, extent in logs.items()},
        }


class InterruptWatch:
    """A main-thread context: a first SIGINT or SIGTERM sets ``requested``, a second interrupts."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "InterruptWatch":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.requested = True
