"""Metadata of the benchmarks, so that a checkout on PYTHONPATH has their entry points.

Written into ``benchmarks/daf_bench.egg-info``, which git ignores. An installation needs none.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def write_entry_points(folder: Path = BENCHMARKS) -> None:
    """Write what ``pip install ./benchmarks`` would, of names and entry points."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    facts = {"Metadata-Version": "2.1", "Name": project["name"], "Version": project["version"]}
    facts["Summary"] = project["description"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items()), ""]
    metadata = folder / "daf_bench.egg-info"
    metadata.mkdir(exist_ok=True)
    _replace(metadata / "PKG-INFO", "".join(f"{name}: {fact}\n" for name, fact in facts.items()))
    _replace(metadata / "entry_points.txt", "\n".join(lines))


def _replace(path: Path, text: str) -> None:
    """Write a file that other processes may be reading."""
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


if __name__ == "__main__":
    write_entry_points(*map(Path, sys.argv[1:]))
