"""``daf bench start``: from a session's making to its steady step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from daf_bench.cli_output import JsonOption, OnlyOption, OutOption, QuickOption, run_kept
from daf_bench.start import run
from daf_bench.start.child import TWO_LAYERS
from daf_bench.workloads import named_workloads


def start_command(
    out: OutOption = None,
    only: OnlyOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time first steps, short runs and steady steps in fresh processes, beside plain PyTorch.

    --only names workloads; "two layers" is one.
    """
    job = run.quick_job() if quick else run.StartJob()
    if only is not None:
        names = [each.strip() for each in only.split(",")]
        known = [n if n == TWO_LAYERS else named_workloads(n)[0] for n in names]
        job = replace(job, workloads=tuple(known))
    run_kept(partial(run.run, job), out, as_json=as_json)
