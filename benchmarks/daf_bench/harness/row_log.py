"""Rows of a long measurement, written as they come, so that it can go on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from daf.core.errors import RunFolderError

Row = dict[str, Any]


class RowLog:
    """Rows by name, each measured once: kept in memory and, if a path is given, in JSON lines.

    The first line says what is measured; rows of another measurement are never mixed in.

    Raises:
        RunFolderError: the file holds another measurement, or no rows at all.
    """

    def __init__(self, path: Path | None, measured: Mapping[str, Any]) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        head = {"measured": json.loads(json.dumps(measured))}
        if path is None:
            return
        if path.exists():
            self._read(path, head)
        # Anew, because the last line may be half written.
        lines = [head, *({"name": name, "row": row} for name, row in self._rows.items())]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @property
    def rows(self) -> list[Row]:
        """Every row, in the order in which they came."""
        return list(self._rows.values())

    def row(self, name: str, make: Callable[[], Row]) -> Row:
        """The row called ``name``; measured now if it is not there."""
        if name not in self._rows:
            found = make()
            self._rows[name] = found
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"name": name, "row": found}) + "\n")
        return self._rows[name]

    def has(self, name: str) -> bool:
        """Whether that row was measured already."""
        return name in self._rows

    def _read(self, path: Path, head: Row) -> None:
        found = [line for line in map(_parsed, path.read_text().splitlines()) if line]
        if not found or found[0] != head:
            raise RunFolderError(
                f"{path} holds another measurement ({str(found[:1])[:200]}); asked for {head}; "
                "name another file with --out, or remove that one"
            )
        self._rows = {line["name"]: line["row"] for line in found[1:]}


def _parsed(line: str) -> Row:
    """One line; nothing if it is not whole."""
    try:
        found: Row = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return found
