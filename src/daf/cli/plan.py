"""``daf plan``: what a budget would mean, without training."""

# ruff: noqa: ARG001 - typer declares options as arguments; they are read from its context.
from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from daf.cli import options
from daf.cli.train import asked_settings
from daf.planner import predict_saved
from daf.training.job import Job, make_job
from daf.training.settings import TrainSettings
from daf.units import format_bytes


def plan_command(
    ctx: typer.Context,
    model: options.Model = None,
    data: options.Data = "digits",
    budget: options.Budget = None,
    batch_size: options.BatchSize = 128,
    seed: options.Seed = 0,
    optimizer: options.Optimizer = None,
    memory_format: options.MemoryFormat = "channels_last",
    threads: options.Threads = None,
    bits: options.Bits = None,
    allow_batchnorm_split: options.AllowSplit = False,
    goal: options.GoalOption = None,
    image_size: options.ImageSize = None,
    context: options.Context = None,
    as_json: options.Json = False,
) -> None:
    """Measure a few small steps of MODEL on DATA and say how it would train within --budget."""
    job = make_job(TrainSettings(**asked_settings(ctx)))
    with job.session:
        job.session.prepare(job.train_batch(0), job.task.loss)
        outline = outline_of(job)
    if as_json:
        print(json.dumps(outline))
    else:
        _show(outline)


def outline_of(job: Job) -> dict[str, Any]:
    """A prepared job's plan: the account (bytes), the policy and its reason, one row per site."""
    session = job.session
    assert session.plan is not None
    return {
        "budget_bytes": session.budget_bytes,
        "account": _account(job),
        "policy": session.plan.policy.name,
        "micro_batch": session.plan.micro_batch,
        "reason": session.plan.reason,
        "process_settings": list(session.settings),
        "sites": session.explain(),
    }


def _account(job: Job) -> dict[str, int] | None:
    """The terms of the predicted peak; None without a budget, where nothing was measured."""
    session = job.session
    profile, plan = session.profile, session.plan
    if profile is None or plan is None:
        return None
    known = {
        "floor": profile.floor_bytes,
        "parameters": profile.parameter_bytes,
        "gradients": profile.gradient_bytes,
        "optimizer_state": profile.optimizer_bytes,
        "saved": predict_saved(profile, plan.policy.name, plan.micro_batch),
    }
    rest = plan.predicted_peak_bytes - sum(known.values())
    return known | {"transient_and_slack": rest, "predicted_peak": plan.predicted_peak_bytes}


def _show(outline: dict[str, Any]) -> None:
    console = Console()
    console.print(f"plan: {outline['reason']}", highlight=False)
    if outline["account"] is not None:
        account = Table("term", "bytes", title="account")
        for name, size in outline["account"].items():
            account.add_row(name.replace("_", " "), format_bytes(size))
        console.print(account)
    if outline["sites"]:
        console.print(_site_table(outline["sites"]))


def _site_table(sites: list[dict[str, Any]]) -> Table:
    table = Table("site", "need", "treatment", "plain", "held", title="saved tensors, as measured")
    for row in sites:
        sizes = format_bytes(row["plain_bytes"]), format_bytes(row["held_bytes"])
        table.add_row(str(row["site"]), str(row["need"]), str(row["treatment"]), *sizes)
    return table
