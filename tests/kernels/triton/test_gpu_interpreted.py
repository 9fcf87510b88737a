"""The GPU tests in a process of their own, where Triton interprets its kernels in NumPy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from thoroughness import ALL, at_most

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
TESTS = Path(__file__).parents[2]
FILES = [
    *sorted(Path(__file__).parent.glob("test_gpu*.py")),
    TESTS / "capture/test_device_capture.py",
]


@pytest.mark.parametrize(
    ("names", "at_least"),
    [
        pytest.param(("test_gpu", "test_gpu_reduce"), 140, marks=pytest.mark.thorough),
        pytest.param(("test_gpu_norm", "test_gpu_speed"), 30, marks=pytest.mark.thorough),
        (("test_device_capture",), at_most(24, 16)),
    ],
)
def test_gpu_kernels_under_the_interpreter(names: tuple[str, ...], at_least: int) -> None:
    own = [str(path) for path in FILES if path.stem in names]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # How errors shrink with bits is seen on the processor, whose gradients these are to the bit.
    chosen = ["-k", "not errors_shrink_with_bits"] + ([] if ALL else ["-m", "not thorough"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *own]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= at_least
    assert "skipped" not in done.stdout.splitlines()[-1]
