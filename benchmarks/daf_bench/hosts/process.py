"""A host in a process of its own: ``python -m daf_bench.hosts.process JSON``."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from daf.core.errors import BudgetError, HostError
from daf.memory import process_memory
from daf_bench.hosts.gate import Gate
from daf_bench.hosts.material import SMALL, Shape, load_texts, make_model
from daf_bench.hosts.setting import Given, Setting
from daf_bench.workloads.sources import Sources


def given_by(setting: Setting) -> Given:
    """Return what the scripts begin with."""
    shape = SMALL if setting.is_small else Shape()
    texts = load_texts(Sources(Path(setting.data) if setting.data else None), shape.vocabulary)
    return Given(
        make_model(shape, setting.seed),
        texts,
        shape,
        setting.updates,
        setting.batch_size or shape.batch_size,
        setting.output,
        setting.budget_bytes,
        setting.options,
    )


def run(setting: Setting, answers: TextIO) -> None:
    """Train by the host's script, an update for each command.

    The optimizer imports torch's compiler, as everywhere: it is part of both sides' floor.
    """
    script = importlib.import_module(f"daf_bench.hosts.scripts.{setting.host}")
    is_budgeted = setting.budget_bytes is not None
    process_memory.warm_up()
    given = given_by(setting)
    process_memory.reset_peak()
    gate = Gate(answers, given.model, is_budgeted=is_budgeted)
    gate.wait()
    try:
        (script.budgeted if is_budgeted else script.plain)(given)
    except (BudgetError, HostError) as error:
        gate.refuse(error)
    else:
        gate.finished()
    gate.wait()


def own_answers() -> TextIO:
    """Return standard output for answers alone; what hosts print goes to standard error."""
    found = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return found


if __name__ == "__main__":
    run(Setting(**json.loads(sys.argv[1])), own_answers())
