"""A run in numbers: its plan in bytes, every saved tensor's treatment, and ``summary.json``."""

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
import torch

from daf.capture.capture import Capture
from daf.core.plan import Plan
from daf.files.records import write_json, write_lines
from daf.offload.host_codes import host_options
from daf.planning.noise import expected_noise
from daf.planning.policies import times_of_sizes
from daf.pool.paged_pool import make_store
from daf.session.session import Session
from daf.step.dry_run import dry_run
from daf.step.microbatch import likely_cut
from daf.step.state_snapshot import preserved_state
from daf.training.job import TrainingJob, pool_options
from daf.training.run_folder import RunFolder
from daf.training.task import Batch

_LOSS_WINDOW_STEPS = 50  # at most, of the last epoch
# What is told under its own name.
_OF_SESSION = """
budget_bytes peak_bytes predicted_peak_bytes saved_bytes_plain saved_bytes_peak pool_bytes
evicted_bytes release_refusal began_warm
"""
_OF_SENSITIVITY = "examples batch_variance relative squared_bias squared_bias_error"
_OF_SETTINGS, _OF_ORDER = "model data batch_size epochs seed", "steps_per_epoch left_out_per_epoch"


def outline_of(job: TrainingJob, batch: Batch) -> dict[str, Any]:
    """Prepare a job on ``batch``; return its plan: account (bytes), policy, one row per site."""
    session = job.session
    plan = session.prepare(batch, job.task.loss)
    refusal = session.fusion_refusal
    fusion = [f"operators: PyTorch's own: {refusal}"] if refusal else []
    return {
        "budget_bytes": session.budget_bytes,
        **_facts(plan),
        "predicted_step_ms": plan.predicted_step_ms,
        "bound_ms": plan.bound_ms,
        "least_feasible_bytes": session.least_feasible_bytes(),
        "release_gradients": plan.release_gradients,
        "choices": [*plan.choices, *fusion, *times_of_sizes(session.profile)],
        "left_alone": _left_alone(session),
        "noise": _expected_noise_of(session, plan),
        "process_settings": list(session.settings),
        "sites": _sites_of(job, plan, batch),
    }


def write_plan_records(job: TrainingJob, folder: RunFolder) -> None:
    """Write the plan and the last step's treatments; raises RunFolderError if the disk is full.

    A process that made no step leaves the earlier sites, if any. Each file is replaced as a whole,
    so that a resumed run never shows half of one.
    """
    if (plan := job.session.plan) is not None:
        predicted = {"predicted_peak_bytes": job.session.predicted_peak_bytes}
        told = {"choices": list(plan.choices), "left_alone": _left_alone(job.session)}
        told["saved_by_moment"] = dict(plan.saved_by_moment)
        told["forward_moments"] = plan.forward_moments
        write_json(folder.plan, _facts(plan) | told | predicted)
    if rows := [each.as_dict() for each in job.session.sites()]:
        write_lines(folder.sites, rows)


def _left_alone(session: Session) -> list[dict[str, Any]]:
    return [each.as_dict() for each in session.left_alone()]


def _facts(plan: Plan) -> dict[str, Any]:
    """Return the plan's account (bytes; None without a budget), policy, reason and replays."""
    return {
        "account": dict(plan.account) if plan.account else None,
        "policy": plan.policy.name,
        "micro_batch": plan.micro_batch,
        "reason": plan.reason,
        "replayed": sorted(plan.policy.replayed),
    }


def _expected_noise_of(session: Session, plan: Plan) -> dict[str, Any] | None:
    """Return the codes' expected variance ÷ the batch's own, by site, most first; None: none."""
    profile, found = session.profile_of(plan), session.sensitivity
    if profile is None:
        return None
    if not (by_site := expected_noise(profile, plan.policy, plan.micro_batch)):
        return None
    treatments = {
        each.site: plan.policy.treatment(each.need, each.site) for each in profile.savings
    }
    rows = [
        {
            "site": str(site),
            "method": treatments[site].method.value,
            "bits": treatments[site].bits,
            "added_noise": noise,
            "weight": profile.weight(site),
        }
        for site, noise in sorted(by_site.items(), key=lambda each: -each[1])
    ]
    return {
        "added_noise": sum(by_site.values()),
        "tolerance": session.noise.tolerance,
        "is_measured": found is not None,
        "squared_bias": None if found is None else found.squared_bias,
        "squared_bias_error": None if found is None else found.squared_bias_error,
        "sites": rows,
    }


def _sites_of(job: TrainingJob, plan: Plan, batch: Batch) -> list[dict[str, str | int]]:
    """Return one row per saved tensor (bytes), from a forward pass over one micro-batch."""
    part = likely_cut(batch).take(batch, 0, plan.micro_batch)
    host = host_options(job.model, job.settings.host_bytes)
    capture = Capture(job.model, make_store(pool_options(job.settings)), host=host)
    with preserved_state(job.model, job.task.loss, gradients=True):
        if plan.policy.fused:
            dry_run(capture, job.model, plan.policy, batch, job.task.loss)
        with capture.step(plan.policy, seed=0, step_index=0, batch=part):
            job.task.loss(job.model, part)
        return [report.as_dict() for report in capture.sites()]


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
        "step_ms_median": float(np.median([ms for _, _, ms, _ in rows])) if rows else None,
        "examples_per_s": float(np.median([rate for *_, rate in rows])) if rows else None,
        "loss": float(np.mean(recent)) if recent else None,
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
    account = plan.account if plan else None
    return {
        "device": str(job.device),
        **_told(session, _OF_SESSION),
        "floor_bytes": account["floor"] if account else session.baseline_bytes,
        "release_gradients": job.settings.release_gradients,
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
        **_told(found, _OF_SENSITIVITY),
        "added_noise": sum(job.session.noise.by_site.values()),
        "by_site": {str(site): noise for site, noise in job.session.noise.by_site.items()},
        "last_record": last,
    }


def _what_was_trained(job: TrainingJob) -> dict[str, Any]:
    group = job.optimizer.param_groups[0]
    return {
        **_told(job.settings, _OF_SETTINGS),
        **_told(job.order, _OF_ORDER),
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "goal": job.goal.value,
        "optimizer": job.optimizer_name,
        "learning_rate": group["lr"],
        "weight_decay": group["weight_decay"],
        "threads": torch.get_num_threads(),
    }


def _told(of: object, names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names.split()}


def versions() -> dict[str, str]:
    """Return versions of everything that a result can depend on."""
    return {
        "daf": metadata.version("daf-train"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
    }
