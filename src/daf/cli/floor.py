"""What the process of ``daf train`` holds before there are data and a model."""

from __future__ import annotations

import subprocess
import sys

_LIMIT_S = 120.0
# Resident pages are read without DAF, which is not imported yet.
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
    """Resident bytes that the imports of ``daf train`` add to ``import torch`` and one product.

    Measured in a process of its own; None where the system does not say what is resident.
    """
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    return int(done.stdout) if done.returncode == 0 else None
