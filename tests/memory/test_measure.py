"""The measured sizes follow what the process really holds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from daf.memory import glibc, process_memory

BLOCK_BYTES = 64 * 1024 * 1024
SLACK_BYTES = 6 * 1024 * 1024

needs_peak = pytest.mark.skipif(
    not process_memory.peak_is_exact(), reason="this system keeps no resettable high-water mark"
)
needs_glibc = pytest.mark.skipif(
    not glibc.return_free_memory(), reason="the C library is not glibc"
)


def hold(count_bytes: int) -> np.ndarray:
    """Written bytes straight from the C library, whatever else runs under torch's tensors."""
    return np.ones(count_bytes, dtype=np.uint8)


@pytest.fixture(autouse=True)
def no_free_memory() -> None:
    """What earlier tests freed goes back first; a block placed there would grow nothing."""
    glibc.return_free_memory()


def test_resident_size_grows_by_what_is_held() -> None:
    before = process_memory.resident_bytes()
    block = hold(BLOCK_BYTES)
    assert abs(process_memory.resident_bytes() - before - block.nbytes) < SLACK_BYTES


@needs_peak
def test_peak_remembers_what_was_freed_and_forgets_on_reset() -> None:
    process_memory.reset_peak()
    before = process_memory.resident_bytes()
    block = hold(BLOCK_BYTES)
    del block
    assert process_memory.peak_bytes() - before > BLOCK_BYTES - SLACK_BYTES
    assert process_memory.reset_peak()
    assert process_memory.peak_bytes() - process_memory.resident_bytes() < SLACK_BYTES


def test_timeline_sees_a_block_that_lived_for_a_while() -> None:
    with process_memory.MemoryTimeline(interval_ms=5) as timeline:
        before = process_memory.resident_bytes()
        block = hold(BLOCK_BYTES)
        timeline.mark("held")
        time.sleep(0.1)
        del block
    assert max(size for _, size in timeline.samples) - before > BLOCK_BYTES - SLACK_BYTES
    assert [label for _, label in timeline.marks] == ["held"]
    seconds = [second for second, _ in timeline.samples]
    assert seconds == sorted(seconds)


@needs_glibc
@needs_peak
def test_freed_blocks_return_at_once_while_entered() -> None:
    # A fresh process: in an old one the heap's own holes, left by whatever ran before, may serve
    # the blocks, and a hole is given back only when its neighbours go too.
    program = """
import numpy as np
from daf.memory import glibc, process_memory
from daf.memory.owners import Claim, owners
claim = Claim(returns_freed_blocks=True)
owners.enter(claim)
blocks = [np.ones(1024 * 1024, dtype=np.uint8) for _ in range(64)]
held = process_memory.resident_bytes()
# Every second one: a heap could not give these back.
del blocks[::2]
print(held - process_memory.resident_bytes())
owners.leave(claim)
assert not glibc.returns_freed_blocks()
"""
    returned_bytes = int(
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    )
    assert returned_bytes > 32 * 1024 * 1024 - SLACK_BYTES


def test_after_the_warm_up_a_first_convolution_brings_little_more_into_the_process() -> None:
    program = """
import sys, torch
from daf.memory import process_memory
if sys.argv[1] == "warm":
    process_memory.warm_up()
before = process_memory.resident_bytes()
images = torch.ones(2, 8, 16, 16, requires_grad=True)
torch.nn.functional.conv2d(images, torch.ones(8, 8, 3, 3), padding=1).sum().backward()
print(process_memory.resident_bytes() - before)
"""
    cold, warm = (
        int(
            subprocess.run(
                [sys.executable, "-c", program, how], capture_output=True, check=True
            ).stdout
        )
        for how in ("cold", "warm")
    )
    assert warm < cold / 4


@needs_peak
def test_a_kept_descriptor_that_became_another_file_is_neither_believed_nor_written() -> None:
    before = process_memory.resident_bytes()  # opens it
    kept = process_memory._open_status(os.getpid())
    with tempfile.TemporaryFile() as other:
        other.write(b"somebody else's")
        other.flush()
        os.dup2(other.fileno(), kept)
        assert process_memory.reset_peak()
        assert process_memory.resident_bytes() > before / 2
        assert process_memory._open_status(os.getpid()) != kept
        assert os.pread(kept, 100, 0) == b"somebody else's"
        os.close(kept)


@needs_peak
def test_what_the_system_does_not_report_takes_no_descriptor_each_time() -> None:
    process_memory.resident_bytes()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(OSError, match="VmNowhere"):
            process_memory._own_bytes("VmRSS", "VmNowhere")
        process_memory.resident_bytes()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
