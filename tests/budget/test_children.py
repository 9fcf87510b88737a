"""What child processes hold alone is subtracted from a budget of the tree."""

from __future__ import annotations

import os
import time

import pytest
import torch
from made_up import MB, Tree

from daf.budget import system
from daf.budget.governor import RISE_AFTER_S, Governor
from daf.budget.system import THIS_SYSTEM, children_bytes


def rollup(private_mb: int, shared_mb: int = 0, swapped_mb: int = 0) -> str:
    sizes = {
        "Rss": private_mb + shared_mb,
        "Shared_Clean": shared_mb,
        "Private_Clean": private_mb // 4,
        "Private_Dirty": private_mb - private_mb // 4,
        "Swap": swapped_mb,
    }
    lines = (f"{name}:  {size * MB // 1024} kB" for name, size in sizes.items())
    return "00400000-7ff [rollup]\n" + "\n".join(lines) + "\n"


def with_child(tree: Tree, parent: str, child: str, text: str | None) -> None:
    """One more child of a process's only thread."""
    path = f"/proc/{parent}/task/{parent}/children"
    tree.write(path, f"{tree.system().read(path) or ''}{child} ")
    if text is not None:
        tree.write(f"/proc/{child}/smaps_rollup", text)
        tree.write(f"/proc/{child}/task/{child}/children", "")


def test_private_and_swapped_bytes_of_all_descendants_add_up(tree: Tree) -> None:
    tree.write("/proc/self/smaps_rollup", rollup(300))
    assert children_bytes(tree.system()) == 0
    with_child(tree, "self", "20", rollup(100, shared_mb=900))
    with_child(tree, "20", "31", rollup(40, swapped_mb=60))
    with_child(tree, "self", "22", None)  # it has just ended
    assert children_bytes(tree.system()) == pytest.approx(200 * MB, abs=10_000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("has_rollup", [True, False])
def test_a_child_s_own_pages_count_and_shared_ones_do_not(
    has_rollup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_rollup:
        monkeypatch.setattr(system, "kibibytes", None)
        monkeypatch.setattr(type(THIS_SYSTEM), "read", lambda *_: None)
    before, shared = children_bytes(THIS_SYSTEM), torch.ones(80 * MB, dtype=torch.uint8)
    pid = os.fork()
    if pid == 0:
        held = torch.ones(50 * MB, dtype=torch.uint8) if shared[0] else None
        time.sleep(60)
        os._exit(held is None)
    try:
        end_s = time.monotonic() + 30
        while children_bytes(THIS_SYSTEM) - before < 50 * MB and time.monotonic() < end_s:
            time.sleep(0.01)
        assert children_bytes(THIS_SYSTEM) - before == pytest.approx(50 * MB, abs=25 * MB)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.11
        return self.now_s


def test_a_budget_of_the_tree_falls_with_children_and_rises_when_they_end(tree: Tree) -> None:
    tree.write("/proc/self/smaps_rollup", rollup(300))
    governors = {
        (scope, asked): Governor(asked, tree.system(), Clock(), scope=scope)
        for scope in ("process", "tree")
        for asked in ("1GB", "auto")
    }
    assert governors["tree", "1GB"].refresh().budget_bytes == 1000 * MB
    auto = governors["process", "auto"].refresh()
    with_child(tree, "self", "20", rollup(300))
    fallen = governors["tree", "1GB"].refresh()
    assert 600 * MB <= fallen.budget_bytes <= 700 * MB
    assert "child processes" in fallen.reason
    assert governors["process", "1GB"].refresh().budget_bytes == 1000 * MB
    # "auto" follows what is available, which children's bytes are not.
    assert governors["tree", "auto"].refresh() == auto
    tree.write("/proc/self/task/self/children", "")
    governor = governors["tree", "1GB"]
    for _ in range(int(RISE_AFTER_S / 0.11) + 3):
        governor.refresh()
    assert governor.reading.budget_bytes == 1000 * MB
