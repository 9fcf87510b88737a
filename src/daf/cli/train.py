"""``daf train``: train a model inside a byte budget and leave a run folder."""

# ruff: noqa: ARG001 - typer declares options as arguments; they are read from its context.
from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from daf.cli import options
from daf.cli.display import make_display, show_summary
from daf.cli.group import EXIT_INTERRUPTED
from daf.core.units import parse_optional_bytes
from daf.report.picture import draw_memory_elsewhere
from daf.training.loop import train
from daf.training.run_folder import RunFolder
from daf.training.settings import TrainSettings

Out = Annotated[
    Path | None, typer.Option(help="The run's folder; by default runs/MODEL-DATA-TIME.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, as it was begun.")
]


def train_command(
    ctx: typer.Context,
    model: options.Model = None,
    data: options.Data = "digits",
    budget: options.Budget = None,
    device: options.Device = "cpu",
    batch_size: options.BatchSize = 128,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.")] = None,
    seed: options.Seed = 0,
    out: Out = None,
    resume: Resume = False,
    optimizer: options.Optimizer = None,
    learning_rate: options.LearningRate = None,
    momentum: options.Momentum = 0.9,
    weight_decay: options.WeightDecay = None,
    memory_format: options.MemoryFormat = "channels_last",
    threads: options.Threads = None,
    bits: options.Bits = None,
    fused: options.Fused = False,
    policy: options.Policy = None,
    tolerance: options.Tolerance = None,
    pool_bytes: options.PoolBytes = None,
    host_bytes: options.HostBytes = None,
    release_gradients: options.ReleaseGradients = False,
    sensitivity: options.Sensitivity = None,
    rollback: Annotated[
        bool,
        typer.Option(
            "--rollback/--no-rollback",
            help="Go back to the last good state, with wider codes, if the run diverges; once.",
        ),
    ] = True,
    allow_batchnorm_split: options.AllowSplit = False,
    goal: options.GoalOption = None,
    augment: options.Augment = None,
    image_size: options.ImageSize = None,
    context: options.Context = None,
    tokenizer: options.Tokenizer = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps; by default at the end of every epoch.")
    ] = None,
    memory_interval_ms: Annotated[
        float, typer.Option(min=1.0, help="How often memory is sampled.")
    ] = 50.0,
    history: Annotated[
        bool,
        typer.Option(
            "--history", help="Record who asks for memory in one step, as history.pickle."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Train MODEL on DATA with the process's memory, or a GPU's, kept below --budget."""
    asked = asked_settings(ctx)
    if resume:
        folder = RunFolder(out) if out is not None else None
        if folder is None:
            raise typer.BadParameter("say which run: --resume --out runs/NAME")
        settings = folder.read_settings().resumed_with(_given(ctx, asked))
    else:
        settings = TrainSettings(**asked)
        folder = RunFolder(out or _default_out(settings))
    try:
        summary = train(settings, folder.path, make_display(quiet=as_json), resume=resume)
    except KeyboardInterrupt:
        _say_how_to_resume(folder, "the step in progress was abandoned")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if summary["finished"]:
        _draw(folder)
    _print(summary, folder, as_json=as_json)
    if not summary["finished"]:
        _say_how_to_resume(folder, f"stopped after step {summary['steps']}")
        raise typer.Exit(EXIT_INTERRUPTED)


def asked_settings(ctx: typer.Context) -> dict[str, Any]:
    """Return the command's options as arguments of ``TrainSettings``.

    Raises:
        UnitError: ``--budget``, ``--pool-bytes`` or ``--host-bytes`` cannot be parsed.
        UnknownNameError: ``--bits`` cannot be parsed.
        BadParameter: a new run lacks its model or its budget.
    """
    values = dict(ctx.params)
    resume = values.pop("resume", False)
    for name in ("out", "as_json"):
        values.pop(name, None)
    budget = values["budget"]
    if not resume and values["model"] is None:
        raise typer.BadParameter("name a MODEL, such as resnet18")
    if not resume and budget is None:
        raise typer.BadParameter(
            "say --budget 700MB, --budget auto, or --budget none to train plainly"
        )
    values["budget"] = None if budget is None else options.read_budget(budget)
    values["bits"] = options.read_bits(values["bits"])
    for name in ("pool_bytes", "host_bytes"):
        values[name] = parse_optional_bytes(values[name])
    return values


def _given(ctx: typer.Context, asked: dict[str, Any]) -> dict[str, Any]:

    def is_given(name: str) -> bool:
        source = ctx.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    return {name: value for name, value in asked.items() if is_given(name)}


def _default_out(settings: TrainSettings) -> Path:
    data = settings.data.partition(":")[0]
    model = settings.model.rpartition(":")[2]
    return Path("runs") / f"{model}-{data}-{time.strftime('%Y%m%d-%H%M%S')}"


def _draw(folder: RunFolder) -> None:
    trouble = draw_memory_elsewhere(folder.path)
    if trouble:
        print(f"daf: a picture in {folder.path} was not drawn: {trouble}", file=sys.stderr)


def _print(summary: dict[str, Any], folder: RunFolder, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
    else:
        show_summary(summary, folder)


def _say_how_to_resume(folder: RunFolder, what: str) -> None:
    if folder.checkpoint.exists():
        command = f"daf train --resume --out {shlex.quote(str(folder.path))}"
        print(f"daf: {what}; to go on: {command}", file=sys.stderr)
    else:
        print("daf: interrupted before the first step; nothing was kept", file=sys.stderr)
