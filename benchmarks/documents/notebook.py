"""Run ``docs/notebook.ipynb`` from its first cell to its last, as a reader would.

python benchmarks/documents/notebook.py    # rewrites what its cells show
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from words import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
SECONDS_A_CELL = 300


def executed(path: Path = NOTEBOOK) -> Any:
    """Return the notebook as it is after a run; CellExecutionError if a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS_A_CELL, kernel_name="python3").execute()
    return notebook


def outputs_of(notebook: Any) -> list[Any]:
    """Return what all cells show, in order."""
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def without_machine(notebook: Any) -> Any:
    """Drop times, addresses, and texts beside a card: what shows is what is kept."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    for output in outputs_of(notebook):
        if "text/html" in output.get("data", {}):
            output.data["text/plain"] = ""
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":
    nbformat.write(without_machine(executed()), NOTEBOOK)
