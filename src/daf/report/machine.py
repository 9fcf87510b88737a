"""What this machine offers a training run, and which of DAF's mechanisms work on it."""

from __future__ import annotations

import importlib
import os
import platform
from typing import Any

import psutil
import torch

from daf.budget.cgroups import memory_groups
from daf.budget.governor import Governor
from daf.budget.limits import cgroup_limit_bytes, gpu_bound
from daf.budget.pressure import pressure_files
from daf.budget.request import AUTO
from daf.budget.system import THIS_SYSTEM
from daf.memory import glibc, process_memory
from daf.memory.process_memory import soft_limit_bytes


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


def _torch() -> dict[str, Any]:
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    }


def _gpus() -> list[dict[str, Any]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_gpu(index) for index in range(count)]


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
