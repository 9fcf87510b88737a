"""``daf plan``: the plan for a budget, without training."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from daf.cli import options
from daf.core.units import format_bytes
from daf.report.comparison import LEVER_COLUMNS, lever_row
from daf.training.job import make_job
from daf.training.plan_outline import outline_of
from daf.training.settings import TrainSettings

WORST_SITES = 5


@options.takes_settings(of_plan=True)
def plan_command(as_json: options.Json = False, **asked: Any) -> None:
    """Measure a few small steps of MODEL on DATA and say how it would train within --budget."""
    job = make_job(TrainSettings(**options.parsed(asked)))
    with job.session:
        outline = outline_of(job, job.train_batch(0))
    if as_json:
        print(json.dumps(outline))
    else:
        _show(outline)


def _show(outline: dict[str, Any]) -> None:
    console = Console()
    console.print(f"plan: {outline['reason']}", highlight=False)
    if outline["least_feasible_bytes"] is not None:
        least = format_bytes(outline["least_feasible_bytes"])
        console.print(f"the least budget that could hold this job: {least}", highlight=False)
    if outline["account"] is not None:
        account = Table("term", "bytes", title="account")
        for name, size in outline["account"].items():
            account.add_row(name.replace("_", " "), format_bytes(size))
        console.print(account)
    if outline["noise"] is not None:
        _show_noise(console, outline["noise"])
    if outline["choices"]:
        console.print(_choice_table(outline["choices"]))
    if outline["left_alone"]:
        levers = Table(*LEVER_COLUMNS, title="left alone")
        for row in outline["left_alone"]:
            levers.add_row(*lever_row(row))
        console.print(levers)
    if outline["sites"]:
        console.print(_site_table(outline["sites"]))


def _show_noise(console: Console, noise: dict[str, Any]) -> None:
    known = "measured" if noise["is_measured"] else "expected; nothing was measured"
    console.print(
        f"codes add {noise['added_noise']:.3g} of the batch's own gradient noise ({known}), of "
        f"at most {noise['tolerance']:.3g}",
        highlight=False,
    )
    table = Table("saved tensor", "treatment", "noise", "of all", title="noise: the worst")
    for row in noise["sites"][:WORST_SITES]:
        treatment = f"{row['method']} {row['bits'] or ''}".strip()
        share = f"{row['added_noise'] / noise['added_noise']:.0%}"
        table.add_row(row["site"], treatment, f"{row['added_noise']:.3g}", share)
    console.print(table)


def _choice_table(choices: list[str]) -> Table:
    table = Table("what", "how, and why", title="choices")
    for line in choices:
        what, _, why = line.partition(": ")
        table.add_row(what, why)
    return table


def _site_table(sites: list[dict[str, Any]]) -> Table:
    table = Table("saved tensor", "need", "treatment", "plain", "held")
    for row in sites:
        sizes = format_bytes(row["plain_bytes"]), format_bytes(row["held_bytes"])
        treatment = f"{row['method']} {row['bits'] or ''}".strip()
        table.add_row(row["site"], row["need"], treatment, *sizes)
    return table
