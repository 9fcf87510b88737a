"""What this machine offers a training run, and which of DAF's mechanisms work on it."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from daf.budget import AUTO, Governor, read_limits
from daf.budget.limits import gpu_bound
from daf.budget.pressure import pressure_files
from daf.budget.system import THIS_SYSTEM
from daf.memory import process_memory
from daf.memory.address_space import address_space_limit_bytes
from daf.memory.glibc import ReturnFreedBlocks

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SELF_CGROUPS = Path("/proc/self/cgroup")


def survey() -> dict[str, Any]:
    """Return all that ``daf doctor`` reports; sizes in bytes, None for *no limit*."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "memory": _memory(),
        "torch": _torch(),
        "gpus": _gpus(),
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
    limits, automatic = read_limits(), Governor(AUTO).reading
    return {
        "auto_budget_bytes": automatic.budget_bytes,
        "auto_budget_reason": automatic.reason,
        "pressure_files": list(pressure_files(THIS_SYSTEM)),
        "total_bytes": limits.total_bytes,
        "available_bytes": limits.available_bytes,
        "cgroup_limit_bytes": limits.cgroup_limit_bytes,
        "address_space_limit_bytes": address_space_limit_bytes(),
        "huge_pages": _huge_pages(),
    }


def _huge_pages() -> str | None:
    """Return the active mode, ``always``, ``madvise`` or ``never``; None without huge pages."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0]


def _torch() -> dict[str, Any]:
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    }


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> dict[str, Any]:
    """Return a GPU's name, total bytes, and bytes that this process could allocate now."""
    (bound,) = gpu_bound(
        lambda: torch.cuda.mem_get_info(index), lambda: torch.cuda.memory_reserved(index)
    )
    return {
        "name": torch.cuda.get_device_name(index),
        "memory_bytes": bound.ceiling_bytes,
        "spare_bytes": bound.most_bytes,
    }


def _works() -> dict[str, bool]:
    with ReturnFreedBlocks() as blocks:
        returns_blocks = blocks.active
    return {
        "native_kernels": instruction_sets() is not None,
        "exact_peak": process_memory.peak_is_exact(),
        "peak_reset": process_memory.reset_peak(),
        "allocator_thresholds": returns_blocks,
        "memory_cgroups": any(os.access(folder, os.W_OK) for folder in _memory_cgroups()),
    }


def _memory_cgroups() -> list[Path]:
    """Return the folders of this process's memory cgroup in which a limited group could be made."""
    try:
        lines = _SELF_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folders.append(_CGROUP_ROOT / "memory" / path.lstrip("/"))
        elif controllers == "":
            group = _CGROUP_ROOT / path.lstrip("/")
            folders += [group] if (group / "memory.max").exists() else []
    return folders
