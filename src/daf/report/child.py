"""Pictures drawn by a process of their own, so that the training process never holds matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_LIMIT_S = 120


def draw_memory_picture(run: Path) -> str:
    """Draw ``memory.png`` into a run's folder; return what went wrong, empty if nothing did."""
    return _draw("memory_picture.py", run)


def _draw(script: str, argument: Path) -> str:
    # By path, not with -m: the package's own imports (torch) are not wanted there.
    command = [sys.executable, str(Path(__file__).with_name(script)), str(argument)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the drawing process ended with {done.returncode}"
