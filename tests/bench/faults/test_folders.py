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


@pytest.mark.parametrize(
    ("part", "count"), [("damaged", 4), ("kills", 2), ("hostile", 20), ("full_disk", 2)]
)
def test_a_few_of_each_part_go_right(part: str, count: int) -> None:
    """In a process of its own, which has no threads and may be forked."""
    code = (
        f"import json; from daf_bench.faults.on_disk.{part} import run_{part}\n"
        f"print(json.dumps(run_{part}({count}, seed=1)))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.pop(f"{part}_tried") == count
    assert set(figures.values()) == {0}, figures


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
