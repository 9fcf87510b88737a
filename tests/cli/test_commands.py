"""Commands are imported when they run; those of other distributions come by entry points."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import import_module, metadata
from inspect import getdoc

import pytest
from typer.testing import CliRunner

from daf.cli import app, commands
from daf.cli.commands import OWN_COMMANDS, find_command
from daf.cli.doctor import floor_above_torch_bytes

HEAVY = ("torch", "numpy", "rich", "daf_bench", "matplotlib")
ENDED = "import sys, daf.cli\ntry: daf.cli.app()\nexcept SystemExit: pass\nprint(*sys.modules)"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_neither_help_nor_version_imports_torch(option: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDED, option], capture_output=True, text=True, check=True
    )
    *shown, modules = done.stdout.splitlines()
    assert {each.partition(".")[0] for each in modules.split()}.isdisjoint(HEAVY)
    if option == "--version":
        assert shown == [metadata.version("daf-train")]
    else:
        listed = {line.split()[0] for line in shown if line.startswith("  ")}
        assert listed >= {*OWN_COMMANDS, "bench"}


@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_a_short_help_is_the_first_line_of_the_command_s_own(name: str) -> None:
    text = getdoc(getattr(import_module(f"daf.cli.{name}"), f"{name}_command")) or ""
    assert text.splitlines()[0] == OWN_COMMANDS[name]


def test_the_benchmarks_are_found_by_their_entry_point() -> None:
    done = CliRunner().invoke(app, ["bench", "--help"])
    assert done.exit_code == 0
    assert "kernels" in done.output
    bench = find_command("bench")
    assert bench is not None
    assert bench.help == "Measure DAF against what a user would pick instead."


def test_without_the_benchmarks_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda **_: [])
    done = CliRunner().invoke(app, ["bench", "main"])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "pip install ./benchmarks" in done.stderr
    assert "bench" not in CliRunner().invoke(app, ["--help"]).output


def test_a_command_from_elsewhere_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("hello", "builtins:print", commands.GROUP)
    monkeypatch.setattr(commands, "entry_points", lambda **_: [point])
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda _: lambda: print("hello"))
    assert CliRunner().invoke(app, ["hello"]).output == "hello\n"


def test_an_unknown_command_is_refused() -> None:
    done = CliRunner().invoke(app, ["no-such"])
    assert done.exit_code == 2
    assert "no-such" in done.output


def test_doctor_says_what_training_s_imports_hold_above_torch() -> None:
    held = floor_above_torch_bytes()
    if platform.system() != "Linux":
        assert held is None
    else:
        assert held is not None
        assert 10**6 < held < 15 * 10**6
