"""Sessions opened, interrupted, dropped and closed in any order, against a model of the process.

The thorough part runs a thousand sequences in pieces, each in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from daf_bench.faults.sequences import run_sequences

from daf.memory.recycling_allocator import unsupported_reason

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
WRONG = ("differences", "gradients_wrong", "errors", "hangs")
PROGRAM = """
import json, sys
from daf_bench.faults.sequences import run_sequences
print(json.dumps(run_sequences(int(sys.argv[1]), int(sys.argv[2]))))
"""


def test_some_sequences_differ_in_nothing_from_the_model() -> None:
    found = run_sequences(7, seed=5)
    assert [found[name] for name in WRONG] == [0, 0, 0, 0]
    assert found["sequences_tried"] == 7
    assert found["steps_tried"] > 10
    assert found["interrupts_tried"] > 3


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_sequences_differ_in_nothing_from_the_model(seed: int) -> None:
    arguments = [sys.executable, "-c", PROGRAM, "100", str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found[name] for name in WRONG] == [0, 0, 0, 0], done.stderr
    assert found["sequences_tried"] == 100
