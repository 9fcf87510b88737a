"""``daf run``: any Python program, its models trained within a budget, or its tensors counted."""

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer import Argument, Option

from daf.core.errors import DataError
from daf.core.units import format_bytes
from daf.memory.allocation_log import track
from daf.session.forward.compress import ScriptModels

Text: TypeAlias = str | None
_BUDGET = "Train every model in it with the process below this, such as 2GB."
_TOLERANCE = "With --budget: the most noise that codes may add; 0: exact only."
_HISTORY = "Record who asks for memory, in this file for pytorch.org/memory_viz."


def run_command(
    script: Annotated[Path, Argument(help="The Python program.")],
    arguments: Annotated[list[str] | None, Argument(help="Its own arguments.")] = None,
    budget: Annotated[Text, Option(help=_BUDGET)] = None,
    tolerance: Annotated[float | None, Option(help=_TOLERANCE)] = None,
    report: Annotated[
        Path | None, Option(help="With --budget: write what models held, as JSON.")
    ] = None,
    limit: Annotated[Text, Option(help="The most that tensors may hold, such as 2GB.")] = None,
    cap: Annotated[Text, Option(help="The most that freed blocks may hold for reuse.")] = None,
    history: Annotated[Path | None, Option(help=_HISTORY)] = None,
    as_json: Annotated[bool, Option("--json", help="End with JSON on standard error.")] = False,
) -> None:
    """Run a Python program within a budget, or count what its tensors hold.

    With --budget every model that it trains runs as under ``daf.compress``; without, under the
    recycling allocator. The program is as under ``python``, its exit code too.
    """
    if not (script.is_file() and os.access(script, os.R_OK)):
        raise DataError(f"asked to run {script}, which is no file; give a program that can be read")
    if budget is not None and (limit, cap, history) != (None, None, None):
        raise typer.BadParameter("--limit, --cap and --history go without --budget")
    if budget is None and (tolerance, report) != (None, None):
        raise typer.BadParameter("--tolerance and --report go with --budget")
    if budget is None:
        running = _counted(limit, cap, history, as_json=as_json)
    else:
        models = ScriptModels(budget, tolerance, lambda text: _tell(f"daf run: {text}"))
        running = _within(models, budget, report, as_json=as_json)
    sys.argv = [str(script), *(arguments or [])]
    sys.path[0] = str(script.resolve().parent)
    with running:
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def _within(
    models: ScriptModels, budget: str, path: Path | None, *, as_json: bool
) -> Iterator[None]:
    """Train the models of what runs inside within the budget; tell at the end what they held."""
    try:
        with models.watching():
            yield
    finally:
        found: dict[str, Any] = {"budget": budget, "peak_bytes": models.peak_bytes()}
        found["models"] = models.reports()
        _tell(json.dumps(found) if as_json else _summary(found))
        if path is not None:
            _write("report", partial(path.write_text, json.dumps(found, indent=1) + "\n"))


def _summary(found: dict[str, Any]) -> str:
    if not found["models"]:
        return (
            "daf run: the program trained no model (it called none in training mode with "
            "gradients), so that nothing was bounded"
        )
    peak = format_bytes(found["peak_bytes"])
    lines = [f"daf run: the process held at most {peak}, of a budget of {found['budget']}"]
    for each in found["models"]:
        line = f"  {each['model']}: {each['calls']} calls"
        if each["calls"]:
            plain, held = (format_bytes(each[f"saved_bytes_{name}"]) for name in ("plain", "peak"))
            line += f"; saved for backward {held}, plain {plain}"
        if each.get("unplanned_because"):
            line += f"; not planned: {each['unplanned_because']}"
        lines.append(line)
    return "\n".join(lines)


def _tell(text: str) -> None:
    typer.echo(text, err=True)


@contextmanager
def _counted(
    limit: str | None, cap: str | None, history: Path | None, *, as_json: bool
) -> Iterator[None]:
    tracking = None
    try:
        with track(limit=limit, cap=cap, history=history is not None) as tracking:
            yield
    finally:
        if tracking is not None:
            if history is not None and tracking.history is not None:
                _write("history", partial(tracking.history.write, history))
            _tell(_counts(tracking.statistics, as_json=as_json))


def _write(what: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        _tell(f"daf: the {what} was not written: {error}")


def _counts(counts: dict[str, int], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(counts)
    names = ("live_bytes.peak", "held_bytes.peak", "fresh_bytes", "returned_bytes")
    live, held, fresh, returned = (format_bytes(counts[name]) for name in names)
    return (
        f"daf run: tensors held at most {live} (with recycled blocks {held}); {fresh} came from "
        f"the system, {returned} went back; {counts['hits']} of {counts['allocations']} "
        f"allocations of 128 KiB and more were recycled blocks"
    )
