"""Made-up /proc and /sys trees, as a Linux of each kind shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from daf.budget.system import System

MB = 10**6
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
ROOT_MOUNT = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
NO_V1_LIMIT = 9223372036854771712


class Tree:
    """A file tree with a process of 300 MB on a machine of 8 GB, 4 GB of them available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rlimits: dict[str, int] = {}
        self.process(300)
        self.machine(8000, 4000)
        self.write("/proc/self/mountinfo", ROOT_MOUNT)

    def system(self) -> System:
        return System(self.root, self.rlimits.get)

    def write(self, path: str, text: object) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        # As the kernel's files, it is whole or not there yet.
        fresh = place.with_name(place.name + ".new")
        fresh.write_text(f"{text}")
        fresh.replace(place)

    def process(self, resident_mb: int, size_mb: int = 2000, data_mb: int = 1000) -> None:
        sizes = {"VmSize": size_mb, "VmRSS": resident_mb, "VmData": data_mb}
        lines = (f"{name}:\t{size * MB // 1024} kB" for name, size in sizes.items())
        self.write("/proc/self/status", "Name:\tpython\n" + "\n".join(lines) + "\nThreads:\t3\n")

    def machine(self, total_mb: int, available_mb: int) -> None:
        total, available = total_mb * MB // 1024, available_mb * MB // 1024
        text = f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n"
        self.write("/proc/meminfo", text)

    def enter_v2(self, path: str, mount: str = V2_MOUNT) -> None:
        self.write("/proc/self/mountinfo", ROOT_MOUNT + mount)
        self.write("/proc/self/cgroup", f"0::{path}\n")

    def enter_v1(self, path: str, mount: str = V1_MOUNT) -> None:
        self.write("/proc/self/mountinfo", ROOT_MOUNT + mount)
        lines = "12:pids:/elsewhere\n4:cpu,memory:{}\n1:name=systemd:/init\n0::/\n"
        self.write("/proc/self/cgroup", lines.format(path))

    def v2_group(
        self,
        path: str,
        used_mb: int,
        maximum_mb: int | None = None,
        high_mb: int | None = None,
        statistics_mb: Mapping[str, int] | None = None,
    ) -> None:
        folder = f"/sys/fs/cgroup{path.rstrip('/')}"
        self.write(f"{folder}/memory.max", _or_max(maximum_mb))
        self.write(f"{folder}/memory.high", _or_max(high_mb))
        self.write(f"{folder}/memory.current", used_mb * MB)
        self._statistics(folder, statistics_mb or {}, "")

    def v1_group(
        self,
        path: str,
        used_mb: int,
        limit_mb: int | None = None,
        statistics_mb: Mapping[str, int] | None = None,
    ) -> None:
        folder = f"/sys/fs/cgroup/memory{path.rstrip('/')}"
        limit = NO_V1_LIMIT if limit_mb is None else limit_mb * MB
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used_mb * MB}\n")
        self._statistics(folder, statistics_mb or {}, "total_")

    def _statistics(self, folder: str, sizes_mb: Mapping[str, int], prefix: str) -> None:
        lines = (f"{prefix}{name} {size * MB}\n" for name, size in sizes_mb.items())
        self.write(f"{folder}/memory.stat", "anon 1\nrss 1\n" + "".join(lines))

    def pressure(self, stalled_us: int, path: str = "/proc/pressure/memory") -> None:
        averages = "avg10=0.00 avg60=0.00 avg300=0.00"
        text = f"some {averages} total={stalled_us}\nfull {averages} total={stalled_us // 2}\n"
        self.write(path, text)


def _or_max(limit_mb: int | None) -> str:
    return "max\n" if limit_mb is None else f"{limit_mb * MB}\n"
