"""What tests of the process's account share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from daf._native import allocator as native

from daf.memory.statistics import stats

PATIENCE_S = 60.0


@pytest.fixture
def account_left_empty() -> Iterator[None]:
    """Fail a test that leaves an allocator, or a block that an allocator handed out.

    What libraries keep for good since an earlier test is theirs (Lightning: 91 blocks of 258 kB).
    """
    collect()
    before = sorted(large_blocks())
    yield
    collect()
    assert not native.is_installed()
    assert sorted(large_blocks()) == before
    assert stats()["live_blocks.large"] == len(before)
    native.refresh()


def collect() -> None:
    """Collect what nobody holds; a planner that was told to stop holds arrays until it ends."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "daf-planner":
            thread.join(PATIENCE_S)
    gc.collect()


def large_blocks() -> list[int]:
    """Return the sizes of the large blocks that are alive (bytes)."""
    return [size for _, size, *_ in native.live_blocks()]
