"""A run's plan and its effect, ``plan.json`` and ``sites.jsonl``, for reports."""

from __future__ import annotations

from daf.training.job import TrainingJob
from daf.training.plan_preview import account_of
from daf.training.run_folder import RunFolder


def write_plan_records(job: TrainingJob, folder: RunFolder) -> None:
    """Write the plan in force, and the treatment of every site in the last step.

    A process that made no step leaves the earlier sites. Each file is replaced as a whole, so that
    a resumed run never shows half of one.

    Raises:
        RunFolderError: the disk is full.
    """
    plan = job.session.plan
    if plan is not None:
        folder.write_plan(
            {
                "policy": plan.policy.name,
                "micro_batch": plan.micro_batch,
                "reason": plan.reason,
                "choices": list(plan.choices),
                "replayed": sorted(plan.policy.replayed),
                "predicted_peak_bytes": job.session.predicted_peak_bytes,
                "account": account_of(plan),
            }
        )
    rows = job.session.explain()
    if rows:
        folder.write_sites(rows)
