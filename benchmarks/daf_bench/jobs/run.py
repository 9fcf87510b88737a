"""``daf bench jobs``: DAF's jobs at their real size, by ``daf train`` as a user runs it.

Each run is a process of its own: plainly, with our plan and with DAF as published, within the same
budgets. Weights are random, so that steps cost what they do in the paper's jobs and nothing is said
of accuracy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from daf.core.errors import UnknownNameError
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.jobs import made
from daf_bench.workloads.sources import Sources, default_sources

Report = Callable[[str, int, int], None]
POLICIES = ("optimal", "daf")


@dataclass(frozen=True, slots=True)
class PaperJob:
    """What is trained on what; ``settings`` are of ``daf train``.

    Batches, lengths and ranks of sentences are LoRA's (Hu et al., ICLR 2022, tables 9 and 11); of
    its batches of 8 texts half: 24 GB do not hold the whole plainly.
    """

    write: Callable[[made.Asked], bool]
    data: str
    batch_size: int
    settings: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None  # of a Transformers model; None: ``model``
    classes: int = 2
    model: str = "resnet18"

    def smaller(self) -> PaperJob:
        """The same of a size that takes a second."""
        settings = {**self.settings, "context": 256} if self.config else {**self.settings}
        if "image-size" in settings:
            settings["image-size"] = 32
        return replace(self, batch_size=4, settings=settings)


def _judged(write: Callable[[made.Asked], bool], data: str, classes: int = 2) -> PaperJob:
    return PaperJob(write, data, 16, {"context": 512, "lora": 8}, made.ROBERTA_BASE, classes)


def _written(write: Callable[[made.Asked], bool], data: str) -> PaperJob:
    return PaperJob(write, data, 4, {"context": 512, "lora": 4}, made.GPT2_MEDIUM)


JOBS: Mapping[str, PaperJob] = {
    "resnet18-cifar10": PaperJob(made.cifar10, "cifar10", 128),
    "resnet18-cifar100": PaperJob(made.cifar100, "cifar100", 128),
    "resnet18-imagenet": PaperJob(
        made.imagenet, "images", 64, {"image-size": 224}, model="resnet18_imagenet"
    ),
    "roberta-sst2": _judged(made.sst2, "sst2"),
    "roberta-mrpc": _judged(made.mrpc, "mrpc"),
    "roberta-stsb": _judged(made.stsb, "stsb", 1),
    "gpt2-e2e": _written(made.e2e, "e2e"),
    "gpt2-webnlg": _written(made.webnlg, "webnlg"),
}


@dataclass(frozen=True, slots=True)
class JobsJob:
    """``shares`` of plain's peak are the budgets; each run takes ``steps`` steps."""

    names: tuple[str, ...] = tuple(JOBS)
    shares: tuple[float, ...] = (0.5,)
    steps: int = 4
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> JobsJob:
    """One of each kind at a size that takes seconds; figures say little."""
    return JobsJob(("resnet18-cifar10", "roberta-mrpc", "gpt2-e2e"), steps=2, is_small=True)


def named_jobs(text: str) -> tuple[str, ...]:
    """Read ``--only``; raises UnknownNameError."""
    names = tuple(each.strip() for each in text.split(","))
    if unknown := sorted(set(names) - JOBS.keys()):
        raise UnknownNameError(f"unknown job {unknown[0]!r}; known: {', '.join(JOBS)}")
    return names


def run(
    job: JobsJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    described = {**asdict(replace(job, sources=Sources())), "sources": job.sources.described()}
    del described["names"]  # later runs may ask for more
    log = RowLog(rows_file, described)
    for place, name in enumerate(job.names):
        on_progress(name, place, len(job.names))
        log.row(name, lambda: _row(job, name))  # noqa: B023
    notes = (
        f"on {torch.get_num_threads()} threads; random weights; batches, lengths and ranks of "
        "sentences as LoRA's paper has them (half its batch for GPT-2), sentences byte by byte and "
        "padded to their length",
        "saved_ratio: the most bytes saved for backward, plain's over ours; step_ratio: the median "
        f"step, ours over plain's, of {job.steps}; peaks are of the process",
        "a budget that is refused is followed by the least that the refusal named",
    )
    return BenchResult("jobs", log.rows, figures_of(log.rows), notes)


def _row(job: JobsJob, name: str) -> Row:
    asked = JOBS[name].smaller() if job.is_small else JOBS[name]
    with TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "data").mkdir()
        examples = asked.batch_size * job.steps
        is_published = asked.write(made.Asked(folder / "data", examples, job.sources))
        model = asked.model
        if asked.config is not None:
            made.write_model(asked.config, asked.classes, folder / "model", is_small=job.is_small)
            model = f"config_json:{folder / 'model'}"
        command = [model, f"{asked.data}:{folder / 'data'}", *_options(asked, job.steps)]
        plain = _trained(folder, command, "none", "plain")
        row: Row = {"job": name, "examples": "published" if is_published else "made up"}
        row |= {"command": " ".join(command).replace(text, "FOLDER"), "plain": plain, "runs": []}
        if "peak_bytes" in plain:
            row["runs"] = _runs(job, folder, command, plain["peak_bytes"])
    return row


def _options(asked: PaperJob, steps: int) -> list[str]:
    settings = {"batch-size": asked.batch_size, "max-steps": steps, **asked.settings}
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def _runs(job: JobsJob, folder: Path, command: Sequence[str], peak_bytes: int) -> list[Row]:
    found = []
    for share in job.shares:
        for policy in POLICIES:
            budget_bytes = int(share * peak_bytes)
            run = _trained(folder, [*command, "--policy", policy], str(budget_bytes), policy)
            if "least_bytes" in run:
                budget_bytes = run["least_bytes"]
                run = _trained(folder, [*command, "--policy", policy], str(budget_bytes), policy)
                run["refused"] = True
            found.append({"share": share, "policy": policy, "budget_bytes": budget_bytes, **run})
    return found


_KEPT = (
    *("peak_bytes", "predicted_peak_bytes", "floor_bytes", "saved_bytes_plain"),
    *("saved_bytes_peak", "micro_batch", "step_ms_median", "loss", "parameters", "plan_reason"),
)


def _trained(folder: Path, command: Sequence[str], budget: str, name: str) -> Row:
    """Run ``daf train`` in a process; returns what its summary says, or its refusal's least."""
    out = folder / "runs" / f"{name}-{budget}"
    asked = [*command, "--budget", budget, "--no-cache", "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "daf", "train", *asked],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        check=False,
    )
    try:
        said = json.loads(done.stdout)
    except ValueError:
        return {"failed": f"exit {done.returncode}: {done.stderr[-500:]}"}
    if "error" not in said:
        return {key: said[key] for key in _KEPT}
    least = said["error"].get("least_bytes")
    return {"failed": said["error"]["message"]} if least is None else {"least_bytes": least}


def ratios_of(row: Row) -> dict[str, dict[str, float]]:
    """By policy, at the first budget: what of a row the figures are made of."""
    plain, found = row["plain"], {}
    for run in row["runs"]:
        if "peak_bytes" in run and run["policy"] not in found:
            found[run["policy"]] = {
                "saved_ratio": plain["saved_bytes_plain"] / max(1, run["saved_bytes_peak"]),
                "peak_ratio": run["peak_bytes"] / plain["peak_bytes"],
                "step_ratio": run["step_ms_median"] / plain["step_ms_median"],
            }
    return found


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Figures by job and policy, their medians, and how many runs failed or passed a budget."""
    figures: dict[str, float] = {}
    by_policy: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        for policy, ratios in ratios_of(row).items():
            by_policy.setdefault(policy, []).append(ratios)
            figures |= {f"{row['job']}/{policy}/{key}": each for key, each in ratios.items()}
    for policy, found in by_policy.items():
        for key in found[0]:
            figures[f"{policy}_{key}_median"] = median(each[key] for each in found)
    runs = [run for row in rows for run in row["runs"]]
    over = sum(run["peak_bytes"] > run["budget_bytes"] for run in runs if "peak_bytes" in run)
    failed = sum("peak_bytes" not in each for each in (*runs, *(row["plain"] for row in rows)))
    return figures | {"jobs": len(rows), "over_budget": over, "failed": failed}
