"""Refused allocations and falling budgets end in exceptions, and the next step is plain's."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from daf._native import allocator as native
from daf_bench.faults.refusals import all_families
from daf_bench.faults.run import figures_of

pytestmark = pytest.mark.skipif(
    bool(native.unsupported_reason()), reason="needs redirected allocations"
)
NOTHING_WRONG = {"crashes": 0, "hangs": 0, "wrong": 0}


def in_fresh_process(program: str) -> Any:
    """Return what a program leaves in ``found``: forks need a process without threads of PyTorch's.

    Children of one that has such would wait for threads that they do not have.
    """
    whole = textwrap.dedent(program) + "\nimport json\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_families_are_many() -> None:
    assert len(all_families()) >= 100


def test_every_eighth_refusal_and_some_falls_are_exceptions() -> None:
    refused, fallen, rows = in_fresh_process(
        """
        from daf_bench.faults import run as faults
        from daf_bench.faults.falls import run_falls
        from daf_bench.faults.refusals import run_refusals
        refused = run_refusals(5, ["conv2d", "lstm", "daf session"], quick=True)
        faults.QUICK_FAMILIES = ("fft",)
        rows = faults.run(faults.FaultsJob(("refusals",), quick=True)).rows
        found = refused, run_falls(40, seed=3), rows
        """
    )
    assert refused.pop("refusals_tried") >= 20
    assert refused == {"refusal_families": 3, **NOTHING_WRONG}
    assert fallen == {"falls_tried": 40, **NOTHING_WRONG}
    assert {row["piece"] for row in rows} == {"fft"}
    assert figures_of(rows)["refusals_tried"] == sum(row["refusals_tried"] for row in rows)


def test_what_goes_wrong_is_counted() -> None:
    """A step that crashes when refused twice, one whose next step is another, and a child's end."""
    found = in_fresh_process(
        """
        import os, signal, time
        import torch
        from daf_bench.faults import children
        from daf_bench.faults.children import in_child
        from daf_bench.faults.family import Family
        from daf_bench.faults.refusals import refuse_family

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

        crashing = refuse_family(Family("crashing", make(True)), seed=0)
        spoilt = refuse_family(Family("spoilt", make(False)), seed=0)
        hung, failed = in_child(lambda: time.sleep(60), 1), in_child(lambda: 1 // 0)
        children._waited_s = lambda pid: 60  # as of one that others kept from running
        starved = in_child(lambda: time.sleep(3) or "whole", 1).value
        found = crashing, spoilt, (hung.hung, hung.crashed), failed.words, starved
        """
    )
    crashing, spoilt, hung, words, starved = found
    assert (crashing["crashes"], crashing["wrong"], crashing["hangs"]) == (2, 0, 0)
    assert (spoilt["crashes"], spoilt["wrong"], spoilt["hangs"]) == (0, 4, 0)
    assert hung == [True, False]
    assert "ZeroDivisionError" in words
    assert starved == "whole"
