"""A limited group holds a small process and kills a greedy one."""

from __future__ import annotations

import sys

import pytest
from daf_bench.harness import cgroup

WORKS, REASON = cgroup.can_limit()
pytestmark = pytest.mark.skipif(not WORKS, reason=REASON)

LIMIT_BYTES = 128 * 2**20


def allocate(count_mib: int) -> list[str]:
    return [sys.executable, "-c", f"b = bytearray({count_mib} << 20); b[::4096] = b[::4096]"]


def test_within_the_limit_a_process_finishes() -> None:
    with cgroup.limited_group(LIMIT_BYTES) as group:
        assert group.run(allocate(64)).returncode == 0
        peak = group.peak_bytes
        assert peak is None or 64 * 2**20 <= peak <= LIMIT_BYTES


def test_beyond_the_limit_a_process_is_killed() -> None:
    with cgroup.limited_group(LIMIT_BYTES) as group:
        assert group.run(allocate(512)).returncode == cgroup.KILLED_BY_SYSTEM
    assert not group.path.exists()
