"""The floor of ``daf train``: what its process holds before data and model exist."""

from __future__ import annotations

import subprocess
import sys

_LIMIT_S = 120.0
# The probe reads resident pages without DAF, which is not imported yet.
_PROBE = """
import os, torch
torch.ones(64, 64) @ torch.ones(64, 64)
def resident_pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
before = resident_pages()
from daf.cli import app
from daf.cli.commands import find_command
find_command("train").load()
print((resident_pages() - before) * os.sysconf("SC_PAGE_SIZE"))
"""


def floor_above_torch_bytes() -> int | None:
    """Measure in a new process how many bytes ``daf train`` adds to torch; None: unknown."""
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    return int(done.stdout) if done.returncode == 0 else None
