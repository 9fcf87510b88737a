"""``daf doctor``: what this machine offers."""

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from daf.budget.cgroups import memory_groups
from daf.budget.governor import Governor
from daf.budget.limits import cgroup_limit_bytes, gpu_bound
from daf.budget.pressure import pressure_files
from daf.budget.request import AUTO
from daf.budget.system import THIS_SYSTEM
from daf.cli import options
from daf.core.units import format_bytes
from daf.memory import glibc, process_memory
from daf.memory.process_memory import soft_limit_bytes

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
    if (floor_bytes := facts["floor_above_torch_bytes"]) is not None:
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


def survey() -> dict[str, Any]:
    """Return all that ``daf doctor`` reports; sizes in bytes, None for *no limit*."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "memory": _memory(),
        "torch": {
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        },
        "gpus": [_gpu(index) for index in range(gpus)],
        "works": _works(),
    }


def _processor() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "architecture": platform.machine(),
        "instruction_sets": instruction_sets(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable,
    }


def instruction_sets() -> list[str] | None:
    """Return the native kernels' usable instruction sets; None if the kernels do not load."""
    try:
        kernels = importlib.import_module("daf.kernels.cpu.instruction_sets")
    except ImportError:
        return None
    return list(kernels.instruction_sets())


def _memory() -> dict[str, Any]:
    memory, automatic = THIS_SYSTEM.machine(), Governor(AUTO).reading
    modes = THIS_SYSTEM.read("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "auto_budget_bytes": automatic.budget_bytes,
        "auto_budget_reason": automatic.reason,
        "pressure_files": list(pressure_files(THIS_SYSTEM)),
        "total_bytes": memory["MemTotal"],
        "available_bytes": memory["MemAvailable"],
        "cgroup_limit_bytes": cgroup_limit_bytes(),
        "address_space_limit_bytes": soft_limit_bytes("RLIMIT_AS"),
        # The mode in brackets: always, madvise or never.
        "huge_pages": None if modes is None else modes.partition("[")[2].partition("]")[0],
    }


def _gpu(index: int) -> dict[str, Any]:
    (bound,) = gpu_bound(
        lambda: torch.cuda.mem_get_info(index), lambda: torch.cuda.memory_reserved(index)
    )
    return {
        "name": torch.cuda.get_device_name(index),
        "memory_bytes": bound.ceiling_bytes,
        "spare_bytes": bound.most_bytes,
    }


def _works() -> dict[str, bool]:
    return {
        "native_kernels": instruction_sets() is not None,
        "exact_peak": process_memory.peak_is_exact(),
        "peak_reset": process_memory.reset_peak(),
        "allocator_thresholds": glibc.can_return_freed_blocks(),
        # A limited group could be made in one of them.
        "memory_cgroups": any(
            group.limits_children(THIS_SYSTEM) and os.access(group.path, os.W_OK)
            for group in memory_groups(THIS_SYSTEM)
        ),
    }
