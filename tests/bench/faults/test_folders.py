"""A few of each fault of folders and data, by a seed; ``daf bench faults`` tries all."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from daf_bench.faults.on_disk.damage import drawn_damage

COUNTS = {"damaged": 4, "kills": 2, "hostile": 20, "full_disk": 2}
PROGRAM = """
import json, sys
from importlib import import_module
counts, found = json.loads(sys.argv[1]), {}
for part, count in counts.items():
    run = getattr(import_module(f"daf_bench.faults.on_disk.{part}"), f"run_{part}")
    found[part] = run(count, seed=1)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    """All parts' in a process of their own, which has no threads and may be forked."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(COUNTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("part", COUNTS)
def test_a_few_of_each_part_go_right(part: str, figures: dict[str, dict[str, int]]) -> None:
    counted = dict(figures[part])
    assert counted.pop(f"{part}_tried") == COUNTS[part]
    assert set(counted.values()) == {0}, counted


def test_damage_is_drawn_from_the_seed_and_changes_something(tmp_path: Path) -> None:
    def damaged(name: str, seed: int) -> tuple[str, dict[str, bytes]]:
        folder = tmp_path / name
        folder.mkdir()
        for number in range(4):
            (folder / f"{number}.json").write_text(json.dumps({"a": [number, 2.5], "b": "text"}))
        done = drawn_damage(random.Random(seed), folder)
        left = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return done, left

    done, left = damaged("first", 3)
    assert (done, left) == damaged("again", 3)
    untouched = {f"{n}.json": json.dumps({"a": [n, 2.5], "b": "text"}).encode() for n in range(4)}
    seen = {damaged(f"other {seed}", seed)[0].split(" ")[0] for seed in range(40)}
    assert len(seen) >= 8
    assert left != untouched
