from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from daf.core.errors import PlatformError
from daf.files.records import GrowingFile, write_json, write_lines
from daf.report.picture import draw_memory, draw_memory_elsewhere
from daf.report.run_charts import levels_of
from daf.report.runs import Memory, Run, read_run
from daf.report.scale import spread

SUMMARY = {
    "model": "resnet18",
    "data": "cifar10:somewhere.npz",
    "budget_bytes": 600_000_000,
    "peak_bytes": 550_000_000,
    "predicted_peak_bytes": 560_000_000,
    "floor_bytes": 300_000_000,
    "steps": 0,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_json(tmp_path / "summary.json", SUMMARY)
    lines: list[dict[str, Any]] = [
        {"seconds": 0.0, "mark": "profile"},
        {"seconds": 2.0, "mark": "train"},
        *({"seconds": i / 10, "resident_bytes": 300_000_000 + i * 5_000_000} for i in range(50)),
        {"seconds": 4.0, "mark": "evaluate"},
    ]
    write_lines(tmp_path / "memory.jsonl", lines)
    return tmp_path


def title(summary: dict[str, Any], budgets: Any = ()) -> str:
    return Run("run", summary, Memory([(0.0, 1.0)], [], budgets), [], None, []).title


def test_the_title_says_how_the_budget_was_kept() -> None:
    assert title(SUMMARY) == "resnet18 on cifar10 stayed 50 MB below its budget of 600 MB"
    passed = title(SUMMARY | {"peak_bytes": 607_000_000})
    assert passed == "resnet18 on cifar10 passed its budget of 600 MB by 7 MB"
    plain = title(SUMMARY | {"budget_bytes": None})
    assert plain == "resnet18 on cifar10, trained plainly, peaked at 550 MB"


def test_the_title_of_a_budget_that_moved_says_between_what() -> None:
    moved = [(0.0, 700.0), (2.0, 300.0), (3.0, None), (4.0, 500.0)]
    assert title(SUMMARY, moved) == "resnet18 on cifar10 followed a budget between 300 and 700 MB"
    assert title(SUMMARY, [(0.0, 600.0)]) == title(SUMMARY)


def red_columns(path: Path, rows: slice) -> int:
    """In how many columns of these rows (from above, as shares) the budget's red is seen."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    height = len(pixels)
    part = pixels[int(rows.start * height) : int(rows.stop * height), : int(0.7 * pixels.shape[1])]
    red = (part[..., 0] > 150) & (part[..., 1] < 90) & (part[..., 2] < 90)
    return int(red.any(axis=0).sum())


def test_a_budget_that_moved_is_drawn_as_steps(run: Path) -> None:
    assert draw_memory_elsewhere(run) == ""
    level = red_columns(run / "memory.png", slice(0.5, 0.9))
    with closing(GrowingFile(run / "memory.jsonl")) as log:
        for seconds, budget in ((-0.5, 600), (1.0, 250), (3.5, 600)):
            log.append([{"seconds": seconds, "budget_bytes": budget * 10**6}])
    assert read_run(run).memory.budgets == [(0.0, 600), (1.0, 250), (3.5, 600)]
    assert draw_memory_elsewhere(run) == ""
    # In the lower half of the picture there is red only while the budget was low.
    assert level == 0
    assert red_columns(run / "memory.png", slice(0.5, 0.9)) > 200


def test_levels_are_those_that_the_run_has_lowest_first() -> None:
    assert [level.value for level in levels_of(SUMMARY)] == [300, 550, 560, 600]
    plain = SUMMARY | {"budget_bytes": None, "predicted_peak_bytes": None}
    assert [level.name for level in levels_of(plain)] == ["floor", "measured peak"]


def test_labels_never_overlap_and_move_only_where_they_must() -> None:
    places = spread([300, 550, 560, 600], 700)
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert min(gaps) >= 0.055 * 700 - 1e-9
    assert places[0] == 300
    assert sum(places[1:]) == pytest.approx(550 + 560 + 600)  # together they stay where they were
    assert spread([100, 300, 600], 700) == [100, 300, 600]


def test_samples_and_marks_come_in_order(run: Path) -> None:
    memory = read_run(run).memory
    assert memory.points[10][1] == 350
    assert [label for _, label in memory.marks] == ["profile", "train", "evaluate"]


def test_the_picture_is_drawn_without_torch(run: Path) -> None:
    check = (
        "import runpy, sys; sys.argv = ['x', sys.argv[1]]\n"
        "try: runpy.run_module('daf.report.picture', run_name='__main__')\n"
        "except SystemExit as done: print(done.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check, str(run)], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["0", "False"], done.stderr
    assert (run / "memory.png").stat().st_size > 20_000


def test_the_picture_has_the_levels_in_it(run: Path) -> None:
    assert draw_memory_elsewhere(run) == ""
    pixels = np.asarray(Image.open(run / "memory.png").convert("RGB")).reshape(-1, 3)
    colours = {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}
    for colour in ((0xC0, 0x39, 0x2B), (0xB2, 0x6A, 0x00), (0x2A, 0x78, 0xB8)):
        assert colour in colours


def test_without_matplotlib_it_is_said_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlatformError, match=r"pip install 'daf-train\[pictures\]'"):
        draw_memory(run)


def test_what_went_wrong_with_a_picture_is_told(tmp_path: Path) -> None:
    assert "summary.json" in draw_memory_elsewhere(tmp_path)
    write_json(tmp_path / "summary.json", SUMMARY)
    (tmp_path / "memory.jsonl").write_text("")
    assert "holds no sample" in draw_memory_elsewhere(tmp_path)
