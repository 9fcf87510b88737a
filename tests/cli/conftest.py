"""Runs of the command line, in this process or in one of their own, on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from daf.cli import app

# A module of factories; what goes wrong in it does so at full batches only, never while profiling.
TINY_MODELS = '''
import atexit, os, signal, sys
from pathlib import Path
import torch
from torch import nn

FULL_BATCH = 32


class Tiny(nn.Module):
    def __init__(self, classes, trouble_at=lambda step: False, trouble=None):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=4)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 8 * 8, classes)
        self.trouble_at, self.trouble, self.steps = trouble_at, trouble, 0

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        if self.training and len(x) == FULL_BATCH:
            self.steps += 1
            if self.trouble_at(self.steps):
                x = self.trouble(x)
        return self.head(nn.functional.dropout(x.flatten(1), 0.2, self.training))


def classifier(classes):
    return Tiny(classes)


def hooked(classes):
    model = Tiny(classes)
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


def explodes(classes):
    return Tiny(classes, lambda step: step >= 3, lambda x: x * float("inf"))


def diverges(classes):
    """From its fifth step on, for as long as codes have a single bit."""
    import gc
    from daf.session.session import Session
    def explode(x):
        sessions = [each for each in gc.get_objects() if type(each) is Session and each.plan]
        narrow = any(each.plan.policy.name == "1-bit" for each in sessions)
        return x * float("inf") if narrow else x
    return Tiny(classes, lambda step: step >= 5, explode)


def interrupts(classes):
    """Where the environment asks for it, interrupts its own process in the midst of a step."""
    def interrupt(x):
        os.kill(os.getpid(), signal.SIGINT)
        return x
    at_step = int(os.environ.get("INTERRUPT_AT_STEP", "0"))
    return Tiny(classes, lambda step: step == at_step, interrupt)


def interrupts_twice(classes):
    def interrupt(x):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return x
    return Tiny(classes, lambda step: step == 2, interrupt)


def squeezes(classes):
    """In the midst of its second step, lowers the budget of the session that trains it."""
    import gc
    from daf.session.session import Session
    def squeeze(x):
        for session in [each for each in gc.get_objects() if type(each) is Session]:
            if session.model is model:
                session.budget = session.budget_bytes - 100_000_000
        return x
    model = Tiny(classes, lambda step: step == 2, squeeze)
    return model


def tells_of_itself(classes):
    """Leaves the modules that were imported, and the sizes of the test batches it saw."""
    model = Tiny(classes)
    sizes = set()
    model.register_forward_pre_hook(lambda _, x: None if model.training else sizes.add(len(x[0])))

    def tell():
        Path("modules.txt").write_text(chr(10).join(sys.modules))
        Path("test_batches.txt").write_text(" ".join(map(str, sorted(sizes))))

    atexit.register(tell)
    return model
'''


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with ``tiny_models.py`` in it."""
    (tmp_path / "tiny_models.py").write_text(TINY_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    sys.modules.pop("tiny_models", None)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("tiny_models", None)


def in_process(*arguments: str) -> Ran:
    """Run the command line in this process."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def daf(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the command line in this process, without the picture that a run ends with.

    Drawing it takes a process of its own most of a second, more than the tiny runs themselves.
    """
    monkeypatch.setattr("daf.cli.train.draw_memory_elsewhere", lambda _: "")
    return in_process


@pytest.fixture
def daf_drawing(workplace: Path) -> Callable[..., Ran]:
    """Run the command line in this process, pictures and all."""
    return in_process


@pytest.fixture
def daf_process(workplace: Path) -> Callable[..., Ran]:
    """Run the command line in a process of its own, as a user does."""

    def run(*arguments: str, **environment: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "daf", *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | environment,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
