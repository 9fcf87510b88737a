"""``daf bench hosts``: training loops of other libraries within a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from daf_bench.cli_output import (
    JsonOption,
    OutOption,
    QuickOption,
    counted_progress,
    keep,
    rows_beside,
    show,
)
from daf_bench.hosts import run
from daf_bench.hosts.catalogue import HOSTS, named_hosts

HostsOption = Annotated[
    str | None, typer.Option("--only", help=f"Of {', '.join(HOSTS)}; by default all.")
]


def hosts_command(
    out: OutOption = None,
    only: HostsOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train by Trainer, TRL, Lightning, Fabric, Accelerate and a plain loop, within a budget."""
    job = run.quick_job() if quick else run.HostsJob()
    if only is not None:
        job = replace(job, hosts=named_hosts(only))
    with counted_progress() as progress:
        result = run.run(job, rows_beside(out), progress)
    keep(result, out)
    show(result, as_json=as_json)
