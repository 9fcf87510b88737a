"""The parts of ``daf bench faults`` that are about files: runs' folders and data."""

from daf_bench.faults.on_disk.damaged import run_damaged
from daf_bench.faults.on_disk.full_disk import run_full_disk
from daf_bench.faults.on_disk.hostile import run_hostile
from daf_bench.faults.on_disk.kills import run_kills

__all__ = ["run_damaged", "run_full_disk", "run_hostile", "run_kills"]
