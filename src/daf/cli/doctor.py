"""``daf doctor``: what this machine offers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from daf.cli import options
from daf.core.units import format_bytes
from daf.report.machine import survey

_PROBE_LIMIT_S = 120.0
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
_WORDS = {
    "native_kernels": "native kernels load",
    "exact_peak": "the system keeps the peak exactly",
    "peak_reset": "the peak can be reset (/proc/self/clear_refs)",
    "allocator_thresholds": "freed blocks can be returned at once (mallopt)",
    "memory_cgroups": "a memory cgroup's folder can be written",
}


def doctor_command(as_json: options.Json = False) -> None:
    """Say what this machine offers: processor, memory, limits, GPU, and what works."""
    facts = survey() | {"floor_above_torch_bytes": floor_above_torch_bytes()}
    if as_json:
        print(json.dumps(facts))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(facts):
        table.add_row(name, value)
    Console().print(table, highlight=False)


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "system", facts["system"]
    yield "python", facts["python"]
    processor = facts["processor"]
    sets = processor["instruction_sets"]
    cores = "{usable_cores} usable of {logical_cores} ({physical_cores} physical)"
    yield "processor", processor["architecture"]
    yield "instruction sets", ", ".join(sets) if sets else "unknown: native kernels do not load"
    yield "cores", cores.format(**processor)
    memory = facts["memory"]
    free = f"{format_bytes(memory['available_bytes'])} free"
    yield "memory", f"{format_bytes(memory['total_bytes'])}, {free}"
    auto = f"{format_bytes(memory['auto_budget_bytes'])} ({memory['auto_budget_reason']})"
    yield "--budget auto", auto
    yield "pressure stalls", ", ".join(memory["pressure_files"]) or "not reported"
    yield "cgroup limit", _limit(memory["cgroup_limit_bytes"])
    yield "address space limit", _limit(memory["address_space_limit_bytes"])
    yield "huge pages", memory["huge_pages"] or "not offered"
    torch = facts["torch"]
    floor_bytes = facts["floor_above_torch_bytes"]
    if floor_bytes is not None:
        yield "daf train", f"{format_bytes(floor_bytes)} above torch before data and model"
    yield "torch", "{version}, {threads} threads, {instruction_set}".format(**torch)
    gpus = [f"{gpu['name']}, {format_bytes(gpu['memory_bytes'])}" for gpu in facts["gpus"]]
    yield "GPU", "; ".join(gpus) or "none"
    for name, works in facts["works"].items():
        yield "yes" if works else "NO", _WORDS[name]


def _limit(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else format_bytes(size_bytes)


def floor_above_torch_bytes() -> int | None:
    """Measure in a new process how many bytes ``daf train`` adds to torch; None: unknown."""
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_LIMIT_S)
    return int(done.stdout) if done.returncode == 0 else None
