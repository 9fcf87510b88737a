"""No command ends in a traceback for what was typed; a program's own error is shown as its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daf.cli import app

SCRIPTS = {
    "raises": 'def inner():\n    raise ValueError("mine")\ninner()\n',
    "fails in a model": "import torch\ntorch.nn.Linear(4, 2)(torch.ones(2, 3))\n",
    "is no Python": "x = (\n",
    "imports nothing": "import surely_absent\n",
    "is binary": "x = 1\0\n",
}
LAST = {
    "raises": "ValueError: mine",
    "fails in a model": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x2)",
    "is no Python": "SyntaxError: '(' was never closed",
    "imports nothing": "ModuleNotFoundError: No module named 'surely_absent'",
    "is binary": "SyntaxError: source code string cannot contain null bytes",
}
HAS_FRAMES = ("raises", "fails in a model", "imports nothing")
EVERY_CHANGE = ("raises", "is binary")


def ran(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "daf", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=cwd
    )


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        pytest.param(kind, (), marks=[pytest.mark.thorough] * (kind not in EVERY_CHANGE))
        for kind in SCRIPTS
    ]
    + [
        pytest.param(
            *(kind, ("--budget", "8GB")),
            marks=[pytest.mark.thorough] * (kind != "fails in a model"),
            id=f"{kind}, within a budget",
        )
        for kind in SCRIPTS
    ],
)
def test_a_program_s_error_is_shown_without_frames_of_daf(
    kind: str, budget: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPTS[kind])
    done = ran("run", *budget, script, cwd=tmp_path)
    assert done.returncode == 1
    shown = done.stderr
    assert LAST[kind] in shown.splitlines()
    files = [line for line in shown.splitlines() if line.startswith('  File "')]
    assert ("Traceback" in shown) == (kind in HAS_FRAMES)
    assert not any("daf" in file.rpartition("site-packages")[2].split("/")[:3] for file in files)
    assert not any("runpy" in file or "/typer/" in file for file in files)
    if kind in HAS_FRAMES:
        assert str(script) in files[0]


def test_a_module_s_error_in_a_factory_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('raise ValueError("mine")\n')
    done = ran("plan", "mine:model", "--budget", "8GB", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: mine"
    assert done.stderr.count('  File "') == 1


WRONG = [
    *("run", "run --budget", "run nowhere.py", "run .", "run --tolerance x --budget 1GB ok.py"),
    *(
        "run --budget 12XB ok.py",
        "run --budget -1 ok.py",
        "run --limit nan ok.py",
        "run --cap 0 ok.py",
    ),
    *("run --tolerance 1 ok.py", "run --budget 1GB --limit 1GB ok.py", "run --bogus ok.py"),
    *("train", "train nothing --budget 1GB", "train resnet18", "train resnet18 --budget 12XB"),
    *("train --resume", "train --resume --out nowhere", "train resnet18 --budget 1GB --lr x"),
    *("plan", "plan nothing --budget 1GB", "plan a:b --budget 1GB", "plan resnet18 --budget x"),
    *("report", "report nowhere", "report .", "report --text --html x nowhere", "doctor x"),
    *("bench", "bench nothing", "bench gradients --only x", "bench sweep --tolerance x"),
    *(
        "bench survival --out .",
        "bench survival --out no/where.json",
        "bench pool --picture x.nope",
    ),
    *(
        "bench main --data nothing",
        "bench allocator --text text:nowhere",
        "bench kernels --device x",
    ),
    *("bench accuracy --rows .", "bench accuracy --data nowhere", "bench accuracy --tasks x"),
    *("bench reduce --varying --picture x.png", "bench survival --out x.jsonl", "nothing", ""),
]


@pytest.mark.parametrize("typed", WRONG)
def test_what_was_typed_wrong_ends_in_a_few_words(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.py").write_text("")
    found = CliRunner().invoke(app, typed.split())
    assert found.exit_code == 2
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert "Traceback" not in found.output
    assert found.output.strip()
