"""``daf plan``: the plan for a budget, without training."""

import inspect
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from daf.cli import options
from daf.core.units import format_bytes
from daf.report.comparison import LEVER_COLUMNS, lever_row
from daf.training.job import make_job
from daf.training.models import MODELS
from daf.training.settings import TrainSettings
from daf.training.summary import outline_of

WORST_SITES = 5
USUAL_DATA = inspect.signature(TrainSettings).parameters["data"].default
_INPUTS = "daf.training.config_json:RandomInputs"


@partial(options.takes_settings, of_plan=True)
def plan_command(as_json: options.Json = False, **asked: Any) -> None:
    """Measure a few small steps of MODEL on DATA and say how it would train within --budget.

    MODEL may be a folder with a config.json of transformers: weights and inputs are random then.
    """
    folder = asked["model"] or ""
    if folder and folder not in MODELS.all() and Path(folder).is_dir():
        if asked["data"] != USUAL_DATA:
            words = f"asked for {asked['data']!r} and the folder {folder!r}; its inputs are random"
            raise typer.BadParameter(f"{words}: leave DATA out, or name a MODEL that reads it")
        asked |= {"model": f"config_json:{folder}", "data": f"{_INPUTS}:{folder}"}
    job = make_job(TrainSettings(**options.parsed(asked)))
    with job.session:
        outline = outline_of(job, job.train_batch(0))
    if as_json:
        print(json.dumps(outline))
    else:
        _show(outline)


def _show(outline: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"plan: {outline['reason']}")
    if outline["least_feasible_bytes"] is not None:
        least = format_bytes(outline["least_feasible_bytes"])
        console.print(f"the least budget that could hold this job: {least}")
    if outline["account"] is not None:
        account = outline["account"].items()
        terms = ((name.replace("_", " "), format_bytes(size)) for name, size in account)
        console.print(_table("account", ("term", "bytes"), terms))
    if outline["noise"] is not None:
        _show_noise(console, outline["noise"])
    if outline["choices"]:
        choices = (line.partition(": ")[::2] for line in outline["choices"])
        console.print(_table("choices", ("what", "how, and why"), choices))
    if outline["left_alone"]:
        console.print(_table("left alone", LEVER_COLUMNS, map(lever_row, outline["left_alone"])))
    if outline["sites"]:
        names = ("saved tensor", "need", "treatment", "plain", "held")
        console.print(_table(None, names, map(_site_row, outline["sites"])))


def _show_noise(console: Console, noise: dict[str, Any]) -> None:
    known = "measured" if noise["is_measured"] else "expected; nothing was measured"
    console.print(
        f"codes add {noise['added_noise']:.3g} of the batch's own gradient noise ({known}), of "
        f"at most {noise['tolerance']:.3g}"
    )
    if (bias := noise["squared_bias"]) is not None:
        console.print(
            f"of the gradient's square {bias:.4f} ± {noise['squared_bias_error']:.4f} are errors "
            "that do not average out"
        )
    rows = []
    for row in noise["sites"][:WORST_SITES]:
        share = f"{row['added_noise'] / noise['added_noise']:.0%}"
        rows.append((row["site"], _treatment(row), f"{row['added_noise']:.3g}", share))
    names = ("saved tensor", "treatment", "noise", "of all")
    console.print(_table("noise: the worst", names, rows))


def _site_row(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = format_bytes(row["plain_bytes"]), format_bytes(row["held_bytes"])
    return row["site"], row["need"], _treatment(row), *sizes


def _treatment(row: dict[str, Any]) -> str:
    return f"{row['method']} {row['bits'] or ''}".strip()


def _table(title: str | None, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*row)
    return table
