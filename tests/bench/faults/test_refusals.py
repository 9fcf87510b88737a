"""Refused allocations and falling budgets end in exceptions, and the next step is plain's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from daf._native import allocator as native
from daf_bench.faults.refusals import all_families
from daf_bench.faults.run import figures_of
from thoroughness import at_most

pytestmark = pytest.mark.skipif(
    bool(native.unsupported_reason()), reason="needs redirected allocations"
)
NOTHING_WRONG = {"crashes": 0, "hangs": 0, "wrong": 0}


def test_families_are_many() -> None:
    assert len(all_families()) >= 100


PROGRAM = """
import json, os, signal, sys, time
import torch
from daf_bench.faults import children, refusals, run as faults
from daf_bench.faults.children import in_child
from daf_bench.faults.falls import run_falls
from daf_bench.faults.family import Family

refusals._QUICK_SHARE = int(sys.argv[1])
refused = refusals.run_refusals(5, ["conv2d", "lstm", "daf session"], quick=True)
faults.QUICK_FAMILIES = ("fft",)
rows = faults.run(faults.FaultsJob(("refusals",), quick=True)).rows
fallen = run_falls(40, seed=3)

def make(crashes):
    def prepare():
        refused = []
        def step():
            try:
                whole = torch.ones(1000)
            except RuntimeError:
                refused.append(True)
                raise
            if crashes and len(refused) > 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            return [whole + (0 if crashes else len(refused))]
        return step
    return prepare

crashing = refusals.refuse_family(Family("crashing", make(True)), seed=0)
spoilt = refusals.refuse_family(Family("spoilt", make(False)), seed=0)
hung, failed = in_child(lambda: time.sleep(60), 1), in_child(lambda: 1 // 0)
children._waited_s = lambda pid: 60  # as of one that others kept from running
starved = in_child(lambda: time.sleep(2.2) or "whole", 1).value
wrong = crashing, spoilt, (hung.hung, hung.crashed), failed.words, starved
print(json.dumps({"right": (refused, fallen, rows), "wrong": wrong}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a fresh process finds: forks need one without threads of PyTorch's.

    Children of one that has such would wait for threads that they do not have.
    """
    command = [sys.executable, "-c", PROGRAM, str(at_most(8, 24))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_some_refusals_and_falls_are_exceptions(found: dict[str, Any]) -> None:
    """Every eighth refusal with ``--all``, else fewer."""
    refused, fallen, rows = found["right"]
    assert refused.pop("refusals_tried") >= 20
    assert refused == {"refusal_families": 3, **NOTHING_WRONG}
    assert fallen == {"falls_tried": 40, **NOTHING_WRONG}
    assert {row["piece"] for row in rows} == {"fft"}
    assert figures_of(rows)["refusals_tried"] == sum(row["refusals_tried"] for row in rows) > 0


def test_what_goes_wrong_is_counted(found: dict[str, Any]) -> None:
    """A step that crashes when refused twice, one whose next step is another, and a child's end."""
    crashing, spoilt, hung, words, starved = found["wrong"]
    assert (crashing["crashes"], crashing["wrong"], crashing["hangs"]) == (2, 0, 0)
    assert (spoilt["crashes"], spoilt["wrong"], spoilt["hangs"]) == (0, 4, 0)
    assert hung == [True, False]
    assert "ZeroDivisionError" in words
    assert starved == "whole"
