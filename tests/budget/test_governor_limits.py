"""Every limit that a Linux can set is found, wherever it is set, and none is overlooked."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MB, V1_MOUNT, V2_MOUNT, Tree

from daf.budget.cgroups import memory_groups
from daf.budget.limits import (
    CACHED_CODE_BYTES,
    Bound,
    cgroup_limit_bytes,
    code_bytes,
    gpu_bound,
    headroom_bytes,
    read_bounds,
)


def bounds(tree: Tree, near_mb: int | None = None) -> dict[str, tuple[int, int]]:
    """Ceiling and most (megabytes, rounded) by name."""
    near = None if near_mb is None else near_mb * MB
    found = read_bounds(tree.system(), near)
    return {
        each.name: (round(each.ceiling_bytes / MB), round(each.most_bytes / MB)) for each in found
    }


def test_without_groups_or_ulimits_only_free_memory_bounds(tree: Tree) -> None:
    assert bounds(tree) == {"free memory": (8000, 4300)}
    assert cgroup_limit_bytes(tree.system()) is None
    assert headroom_bytes(tree.system()) == pytest.approx(4000 * MB, abs=1024)


def test_v2_limits_count_on_every_level_up_to_the_root(tree: Tree) -> None:
    tree.enter_v2("/user.slice/user-1000.slice/app.scope")
    tree.v2_group("/user.slice/user-1000.slice/app.scope", used_mb=350)
    tree.v2_group("/user.slice/user-1000.slice", used_mb=900, maximum_mb=1500)
    tree.v2_group("/user.slice", used_mb=1000, maximum_mb=3000, high_mb=1200)
    found = bounds(tree)
    del found["free memory"]
    assert found == {
        "/sys/fs/cgroup/user.slice/user-1000.slice/memory.max": (1500, 300 + 600),
        "/sys/fs/cgroup/user.slice/memory.max": (3000, 300 + 2000),
        "/sys/fs/cgroup/user.slice/memory.high": (1200, 300 + 200),
    }
    assert cgroup_limit_bytes(tree.system()) == 1200 * MB
    assert cgroup_limit_bytes(tree.system()) == 1200 * MB


def test_v1_limits_count_on_every_level_and_no_limit_is_none(tree: Tree) -> None:
    tree.enter_v1("/docker/abc")
    tree.v1_group("/docker/abc", used_mb=500, limit_mb=800)
    tree.v1_group("/docker", used_mb=2000, limit_mb=2100)
    tree.v1_group("/", used_mb=7000)
    found = bounds(tree)
    assert found["/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"] == (800, 600)
    assert found["/sys/fs/cgroup/memory/docker/memory.limit_in_bytes"] == (2100, 400)
    assert len(found) == 3


def test_side_by_side_both_versions_count(tree: Tree) -> None:
    tree.write("/proc/self/mountinfo", V1_MOUNT + V2_MOUNT)
    tree.write("/proc/self/cgroup", "4:memory:/old\n0::/new\n")
    tree.v1_group("/old", used_mb=400, limit_mb=900)
    tree.v2_group("/new", used_mb=400, maximum_mb=700)
    assert [group.version for group in memory_groups(tree.system())] == [1, 1, 2, 2]
    assert cgroup_limit_bytes(tree.system()) == 700 * MB


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/", "/../../host.slice"])
def test_a_container_that_sees_only_its_own_groups_finds_their_limit(tree: Tree, path: str) -> None:
    mount = V1_MOUNT.replace("0:32 / ", "0:32 /docker/abc ")
    tree.enter_v1(path, mount)
    tree.v1_group("/", used_mb=500, limit_mb=640)
    assert cgroup_limit_bytes(tree.system()) == 640 * MB


def test_a_limit_without_a_usage_file_is_a_bound_all_the_same(tree: Tree) -> None:
    tree.enter_v2("/app")
    tree.write("/sys/fs/cgroup/app/memory.max", 640 * MB)
    assert bounds(tree)["/sys/fs/cgroup/app/memory.max"] == (640, 640)


def test_page_cache_that_nobody_maps_counts_as_room(tree: Tree) -> None:
    tree.enter_v2("/app")
    cache = {"file": 400, "file_mapped": 150, "shmem": 50, "slab_reclaimable": 10}
    tree.v2_group("/app", used_mb=900, maximum_mb=1000, statistics_mb=cache)
    name = "/sys/fs/cgroup/app/memory.max"
    assert bounds(tree)[name] == (1000, 300 + 100 + 200 + 10)
    # Where 350 MB are all that is wanted, the statistics need not be read.
    assert bounds(tree, near_mb=350)[name] == (1000, 400)
    assert bounds(tree, near_mb=450)[name] == (1000, 610)


def test_v1_page_cache_is_read_from_the_lines_that_count_groups_below(tree: Tree) -> None:
    tree.enter_v1("/app")
    cache = {"cache": 300, "mapped_file": 100, "shmem": 20}
    tree.v1_group("/app", used_mb=900, limit_mb=1000, statistics_mb=cache)
    assert bounds(tree)["/sys/fs/cgroup/memory/app/memory.limit_in_bytes"] == (1000, 400 + 180)


def test_code_is_left_room_where_a_groups_limit_is_near_the_budget(tree: Tree) -> None:
    assert code_bytes(500 * MB, tree.system()) == 0  # no limit takes cached pages
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=900, maximum_mb=1000)
    assert code_bytes(900 * MB, tree.system()) == CACHED_CODE_BYTES - 100 * MB
    assert code_bytes(1000 * MB, tree.system()) == CACHED_CODE_BYTES
    assert code_bytes(2000 * MB, tree.system()) == CACHED_CODE_BYTES
    assert code_bytes(1000 * MB - CACHED_CODE_BYTES, tree.system()) == 0


def test_ulimits_bound_by_what_they_leave(tree: Tree) -> None:
    tree.process(300, size_mb=2000, data_mb=1000)
    tree.rlimits = {"RLIMIT_AS": 2500 * MB, "RLIMIT_DATA": 1100 * MB}
    found = bounds(tree)
    assert found["ulimit -v"] == (2500, 800)
    assert found["ulimit -d"] == (1100, 400)
    assert headroom_bytes(tree.system()) == pytest.approx(100 * MB, abs=4096)


def test_a_group_beyond_its_limit_leaves_less_than_is_held(tree: Tree) -> None:
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=1100, high_mb=1000)
    assert bounds(tree)["/sys/fs/cgroup/app/memory.high"] == (1000, 200)
    assert headroom_bytes(tree.system()) == 0


def test_a_gpu_leaves_what_is_free_and_what_is_reserved_already() -> None:
    found = gpu_bound(lambda: (3 * MB, 16 * MB), lambda: 5 * MB)
    assert found == (Bound("free GPU memory", 16 * MB, 8 * MB),)


LEVELS = st.lists(
    st.tuples(
        st.integers(0, 2000),  # used
        st.none() | st.integers(1, 2000),  # maximum
        st.none() | st.integers(1, 2000),  # high
        st.integers(0, 300),  # page cache
    ),
    min_size=1,
    max_size=4,
)


@given(levels=LEVELS)
def test_the_tightest_limit_of_any_hierarchy_is_found(
    levels: list[tuple[int, int | None, int | None, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree, path = Tree(Path(folder)), ""
        most = [300 + 4000]
        for place, (used, maximum, high, cache) in enumerate(levels):
            path += f"/level{place}"
            tree.v2_group(path, used, maximum, high, {"file": cache})
            room = 300 - used + min(cache, used)
            most += [limit + room for limit in (maximum, high) if limit is not None]
        tree.enter_v2(path)
        found = read_bounds(tree.system())
        limits = [limit for level in levels for limit in level[1:3] if limit is not None]
        assert len(found) == 1 + len(limits)
        assert min(each.most_bytes for each in found) == pytest.approx(min(most) * MB, abs=2048)
        assert cgroup_limit_bytes(tree.system()) == (min(limits) * MB if limits else None)
