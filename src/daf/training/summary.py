"""A run in numbers: ``summary.json``."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from daf.training.job import TrainingJob

_LOSS_WINDOW_STEPS = 50  # at most, of the last epoch


def summarize(
    job: TrainingJob,
    steps_done: int,
    rows: Sequence[tuple[float, ...]],
    evaluations: list[dict[str, Any]],
    *,
    finished: bool,
) -> dict[str, Any]:
    """Return the summary of a run; speed and loss come from its log.

    ``rows``: (step, loss, milliseconds, examples a second) of each logged step.
    """
    window = min(_LOSS_WINDOW_STEPS, job.order.steps_per_epoch)
    recent = [loss for _, loss, _, _ in rows[-window:]]
    return {
        **_memory(job),
        "step_ms_median": statistics.median(ms for _, _, ms, _ in rows) if rows else None,
        "examples_per_s": statistics.median(rate for *_, rate in rows) if rows else None,
        "loss": statistics.fmean(recent) if recent else None,
        "metric": evaluations[-1]["metric"] if evaluations else None,
        "metric_name": job.task.metric_name,
        "noise": noise_of(job),
        "finished": finished,
        "steps": steps_done,
        "evaluations": evaluations,
        **_what_was_trained(job),
        "versions": versions(),
    }


def _memory(job: TrainingJob) -> dict[str, Any]:
    session = job.session
    plan = session.plan
    return {
        "device": str(job.device),
        "budget_bytes": session.budget_bytes,
        "floor_bytes": session.baseline_bytes,
        "peak_bytes": session.peak_bytes,
        "predicted_peak_bytes": session.predicted_peak_bytes,
        "saved_bytes_plain": session.saved_bytes_plain,
        "saved_bytes_peak": session.saved_bytes_peak,
        "pool_bytes": session.pool_bytes,
        "evicted_bytes": session.evicted_bytes,
        "release_gradients": job.settings.release_gradients,
        "release_refusal": session.release_refusal,
        "micro_batch": plan.micro_batch if plan else None,
        "policy": plan.policy.name if plan else None,
        "plan_reason": plan.reason if plan else None,
        "predicted_step_ms": plan.predicted_step_ms if plan else None,
        "process_settings": list(session.settings),
    }


def noise_of(job: TrainingJob) -> dict[str, Any] | None:
    """Return the measured noise; None if none was measured.

    Variances are squared lengths: of the gradient of a measured part's mean loss (``examples``), or
    of steps divided by it (``relative``). Their ratio holds for the batch. ``squared_bias``: what
    of the codes' errors does not average out, over the gradient's square. ``overhead``: measuring
    time ÷ training time.
    """
    found, history = job.session.sensitivity, job.session.noise_history
    if found is None:
        return None
    tracker = job.session.noise.tracker
    last = history[-1].as_dict() if history else None
    return {
        "measurements": tracker.measurements,
        "measured_ms": tracker.schedule.measured_ms,
        "overhead": tracker.schedule.measured_ms / max(1e-9, tracker.schedule.trained_ms),
        "examples": found.examples,
        "batch_variance": found.batch_variance,
        "relative": found.relative,
        "squared_bias": found.squared_bias,
        "squared_bias_error": found.squared_bias_error,
        "added_noise": sum(job.session.noise.by_site.values()),
        "by_site": {str(site): noise for site, noise in job.session.noise.by_site.items()},
        "last_record": last,
    }


def _what_was_trained(job: TrainingJob) -> dict[str, Any]:
    group = job.optimizer.param_groups[0]
    return {
        "model": job.settings.model,
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "data": job.settings.data,
        "goal": job.goal.value,
        "batch_size": job.settings.batch_size,
        "epochs": job.settings.epochs,
        "steps_per_epoch": job.order.steps_per_epoch,
        "left_out_per_epoch": job.order.left_out_per_epoch,
        "optimizer": job.optimizer_name,
        "learning_rate": group["lr"],
        "weight_decay": group["weight_decay"],
        "seed": job.settings.seed,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Return versions of everything that a result can depend on."""
    return {
        "daf": metadata.version("daf-train"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
    }
