"""A job's plan in bytes: the account, and every saved tensor's treatment."""

from __future__ import annotations

from typing import Any

from daf.capture.capture import Capture
from daf.core.plan import Plan
from daf.files.records import write_json, write_lines
from daf.offload.host_codes import host_options
from daf.planning.noise import expected_noise
from daf.pool.paged_pool import make_store
from daf.session.session import Session
from daf.step.dry_run import dry_run
from daf.step.microbatch import likely_cut
from daf.step.state_snapshot import preserved_state
from daf.training.job import TrainingJob
from daf.training.run_folder import RunFolder
from daf.training.task import Batch


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
        "choices": [*plan.choices, *fusion],
        "left_alone": _left_alone(session),
        "noise": _noise_of(session, plan),
        "process_settings": list(session.settings),
        "sites": _sites_of(job, plan, batch),
    }


def write_plan_records(job: TrainingJob, folder: RunFolder) -> None:
    """Write the plan and the last step's treatments; raises RunFolderError if the disk is full.

    A process that made no step leaves the earlier sites, if any. Each file is replaced as a whole,
    so that a resumed run never shows half of one.
    """
    plan = job.session.plan
    if plan is not None:
        predicted = {"predicted_peak_bytes": job.session.predicted_peak_bytes}
        told = {"choices": list(plan.choices), "left_alone": _left_alone(job.session)}
        write_json(folder.plan, _facts(plan) | told | predicted)
    rows = [each.as_dict() for each in job.session.sites()]
    if rows:
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


def _noise_of(session: Session, plan: Plan) -> dict[str, Any] | None:
    """Return the codes' expected variance ÷ the batch's own, by site, most first; None: none."""
    profile, found = session.profile_of(plan), session.sensitivity
    if profile is None:
        return None
    by_site = expected_noise(profile, plan.policy, plan.micro_batch)
    if not by_site:
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
    capture = Capture(job.model, make_store(job.settings.pool_bytes), host=host)
    with preserved_state(job.model, job.task.loss, gradients=True):
        if plan.policy.fused:
            dry_run(capture, job.model, plan.policy, batch, job.task.loss)
        with capture.step(plan.policy, seed=0, step_index=0, batch=part):
            job.task.loss(job.model, part)
        return [report.as_dict() for report in capture.sites()]
