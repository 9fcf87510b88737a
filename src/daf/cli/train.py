"""``daf train``: train a model inside a byte budget and leave a run folder."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from daf.cli import options
from daf.cli.commands import EXIT_INTERRUPTED
from daf.cli.display import make_display, show_summary
from daf.report.picture import draw_memory_elsewhere
from daf.training.data import DATA
from daf.training.loop import train
from daf.training.models import MODELS
from daf.training.run_folder import RunFolder
from daf.training.settings import TrainSettings

Out = Annotated[
    Path | None, typer.Option(help="The run's folder; by default runs/MODEL-DATA-TIME.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, as it was begun.")
]


@options.takes_settings
def train_command(
    ctx: typer.Context,
    out: Out = None,
    resume: Resume = False,
    as_json: options.Json = False,
    **asked: Any,
) -> None:
    """Train MODEL on DATA with the process's memory, or a GPU's, kept below --budget."""
    values = options.parsed(asked, resumes=resume)
    if resume:
        if out is None:
            raise typer.BadParameter("say which run: --resume --out runs/NAME")
        folder = RunFolder(out)
        settings = folder.read_settings().resumed_with(_given(ctx, values))
        _say_what_is_imported(folder, settings)
    else:
        settings = TrainSettings(**values)
        data, model = settings.data.partition(":")[0], settings.model.rpartition(":")[2]
        usual = Path("runs") / f"{model}-{data}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = RunFolder(out or usual)
    try:
        summary = train(settings, folder.path, make_display(quiet=as_json), resume=resume)
    except KeyboardInterrupt:
        _say_how_to_resume(folder, "the step in progress was abandoned")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if summary["finished"] and (trouble := draw_memory_elsewhere(folder.path)):
        print(f"daf: a picture in {folder.path} was not drawn: {trouble}", file=sys.stderr)
    print(json.dumps(summary)) if as_json else show_summary(summary, folder)
    if not summary["finished"]:
        _say_how_to_resume(folder, f"stopped after step {summary['steps']}")
        raise typer.Exit(EXIT_INTERRUPTED)


def _given(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    sources = {name: ctx.get_parameter_source(name) for name in values}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    return {name: value for name, value in values.items() if name in given}


def _say_what_is_imported(folder: RunFolder, settings: TrainSettings) -> None:
    for names, reference in ((MODELS, settings.model), (DATA, settings.data)):
        if (origin := names.origin(reference)) is not None:
            what = f"{folder.path} names the {names.kind} {reference!r}"
            print(f"daf: {what}: importing it from {origin}", file=sys.stderr)


def _say_how_to_resume(folder: RunFolder, what: str) -> None:
    if folder.checkpoint.exists():
        command = f"daf train --resume --out {shlex.quote(str(folder.path))}"
        print(f"daf: {what}; to go on: {command}", file=sys.stderr)
    else:
        print("daf: interrupted before the first step; nothing was kept", file=sys.stderr)
