"""How many lines a budget changes in a host's script."""

from __future__ import annotations

import ast
import textwrap
from difflib import SequenceMatcher
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
_IMPORTS = (ast.Import, ast.ImportFrom)


def lines_changed(host: str) -> int:
    """Return how many lines differ between a host's two scripts."""
    source = (SCRIPTS / f"{host}.py").read_text()
    return count_changed(body_lines(source, "plain"), body_lines(source, "budgeted"))


def count_changed(before: list[str], after: list[str]) -> int:
    """Return lines added, removed or written anew; one that replaces another counts once."""
    blocks = SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    return sum(
        max(end - start, new_end - new_start)
        for kind, start, end, new_start, new_end in blocks
        if kind != "equal"
    )


def body_lines(source: str, function: str) -> list[str]:
    """Return a function's lines without imports, docstring, comments and indentation.

    Raises:
        KeyError: there is no such function at the top of the file.
    """
    functions = {
        each.name: each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)
    }
    body = functions[function].body
    if ast.get_docstring(functions[function]) is not None:
        body = body[1:]
    lines = source.splitlines()
    kept = [each for each in body if not isinstance(each, _IMPORTS)]
    found = [
        textwrap.dedent(line).strip()
        for each in kept
        for line in lines[each.lineno - 1 : each.end_lineno]
    ]
    return [line for line in found if line and not line.startswith("#")]
