"""What tests of the process's account share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from daf._native import allocator as native

from daf.memory.statistics import stats


@pytest.fixture
def account_left_empty() -> Iterator[None]:
    """Fail a test that leaves an allocator, or a block that an allocator handed out."""
    gc.collect()
    yield
    gc.collect()
    assert not native.is_installed()
    assert stats()["live_blocks.large"] == 0
    native.refresh()
