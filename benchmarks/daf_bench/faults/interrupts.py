"""Ctrl-C at a chosen line of DAF's own code, where a signal could come as well."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import daf

_PACKAGE = str(Path(daf.__file__).parent)

# What undoes the traces of interrupts has no net beneath it.
_SPARED = ("function_modes.py",)


class InterruptedAt:
    """Raises KeyboardInterrupt at the n-th line of DAF's that this thread runs inside."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __enter__(self) -> InterruptedAt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) or name.endswith(_SPARED) or _is_finalizing(frame):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and frame.f_lineno not in _silent_lines(frame.f_code.co_filename):
            self._left -= 1
            if self._left <= 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


@cache
def _silent_lines(name: str) -> frozenset[int]:
    """Return the lines at which a trace could raise, and no signal comes.

    Those of ``with`` statements, as leaving one is a line too, and ``try:`` itself, an instruction
    that does nothing and lies outside of the ``with`` around it (CPython 3.11). So does what ends
    an ``except`` block and begins a line: raised there, the exception that was caught, and all
    frames with it, would stay with the thread for good.
    """
    text = Path(name).read_text()
    found = set(_ends_of_handlers(compile(text, name, "exec")))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.With):
            found.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Try):
            found.add(node.lineno)
    return frozenset(found)


def _ends_of_handlers(code: CodeType) -> Iterator[int]:
    for offset, line in dis.findlinestarts(code):
        if dis.opname[code.co_code[offset]] == "POP_EXCEPT":
            yield line
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _ends_of_handlers(each)


def _is_finalizing(frame: FrameType | None) -> bool:
    """True inside ``__del__``: Python drops what is raised there, an interrupt too."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
