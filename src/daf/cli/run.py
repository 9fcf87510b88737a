"""``daf run``: any Python program with its CPU tensors counted, recycled and bounded."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from daf.core.errors import DataError
from daf.core.units import format_bytes
from daf.memory.allocation_log import Tracking, track


def run_command(
    script: Annotated[Path, typer.Argument(help="The Python program.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own arguments (after -- if they have dashes).")
    ] = None,
    limit: Annotated[
        str | None, typer.Option(help="The most that tensors may hold, such as 2GB.")
    ] = None,
    cap: Annotated[
        str | None, typer.Option(help="The most that freed blocks may hold for reuse.")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="Record who asks for memory, in this file for pytorch.org/memory_viz."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with all statistics as JSON on standard error.")
    ] = False,
) -> None:
    """Run a Python program under the recycling allocator and say what its tensors held."""
    if not script.is_file():
        raise DataError(f"asked to run {script}, which is no file; give the path of a program")
    sys.argv = [str(script), *(arguments or [])]
    sys.path.insert(0, str(script.resolve().parent))
    tracking = None
    try:
        with track(limit=limit, cap=cap, history=history is not None) as tracking:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        if tracking is not None:
            _keep_history(tracking, history)
            typer.echo(_report(tracking.statistics, as_json=as_json), err=True)


def _keep_history(tracking: Tracking, path: Path | None) -> None:
    if path is None or tracking.history is None:
        return
    try:
        tracking.history.write(path)
    except OSError as error:
        typer.echo(f"daf: the history was not written: {error}", err=True)


def _report(counts: dict[str, int], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(counts)
    names = ("live_bytes.peak", "held_bytes.peak", "fresh_bytes", "returned_bytes")
    live, held, fresh, returned = (format_bytes(counts[name]) for name in names)
    return (
        f"daf run: tensors held at most {live} (with recycled blocks {held}); {fresh} came from "
        f"the system, {returned} went back; {counts['hits']} of {counts['allocations']} "
        f"allocations of 128 KiB and more were recycled blocks"
    )
