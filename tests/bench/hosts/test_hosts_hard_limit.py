"""Under a hard limit of the budget every host alone is killed, and finishes with DAF."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from daf_bench.harness import cgroup
from daf_bench.harness.cgroup import LimitedGroup, limited_group
from daf_bench.harness.subprocess_channel import ContestantError
from daf_bench.hosts.catalogue import HOSTS, missing
from daf_bench.hosts.contestant import Contestant
from daf_bench.hosts.figures import share
from daf_bench.hosts.setting import Setting

WORKS, REASON = cgroup.can_limit()
ALL_BYTES = 8 * 10**9
UPDATES = 3


def finished(setting: Setting, group: LimitedGroup) -> dict[str, int]:
    """Train all updates; return what the process took. Raises ContestantError if it was killed."""
    child = Contestant(setting, group)
    try:
        for _ in range(UPDATES):
            assert "raised" not in child.update()
        return child.facts() | child.finish()
    finally:
        child.end()


@pytest.mark.thorough
@pytest.mark.skipif(not WORKS, reason=REASON)
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_finishes_where_it_is_killed_alone(host: str, tmp_path: Path) -> None:
    """The limit: its floor, and 45 % of its peak above that."""
    if lacking := missing(host):
        pytest.skip(f"{', '.join(lacking)} not installed: the extra `hosts` has it")
    alone = Setting(host, str(tmp_path), UPDATES)
    with limited_group(ALL_BYTES) as group:
        plain = finished(alone, group)
    limit_bytes = share(plain["floor_bytes"], plain["peak_bytes"])
    with limited_group(limit_bytes) as group:
        ours = finished(replace(alone, budget_bytes=limit_bytes), group)
        assert ours["finished"]
        assert ours["peak_bytes"] <= limit_bytes
        with pytest.raises(ContestantError):
            finished(alone, group)
