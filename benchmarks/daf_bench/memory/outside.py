"""``daf bench outside``: how much of what libraries take is in the account, and how much is not.

Each case runs in a process of its own, under DAF's allocator without a limit. By how much that
process grew is read from ``VmHWM``; what the account did not see of it is outside.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import numpy as np
import torch

from daf.memory import process_memory
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import reset_peaks, stats
from daf_bench.harness.result import BenchResult

MB = 10**6
Run = Callable[[int], object]  # does its work on about so many bytes, returns what it keeps


@dataclass(frozen=True, slots=True)
class Case:
    """Work of one library; ``distribution`` is who makes it, "" the interpreter."""

    does: str
    distribution: str
    run: Run

    @property
    def version(self) -> str | None:
        """The installed version, "" the interpreter's, None without it."""
        try:
            return metadata.version(self.distribution) if self.distribution else ""
        except metadata.PackageNotFoundError:
            return None


def _doubles(size: int) -> np.ndarray:
    return np.random.default_rng(0).random(size // 8)


def _square(size: int) -> np.ndarray:
    side = int((size // 8) ** 0.5)
    return _doubles(8 * side * side).reshape(side, side)


def _of(module: str) -> Any:
    return import_module(module)


def _image(size: int) -> Any:
    side = int((size // 3) ** 0.5)
    return _of("PIL.Image").new("RGB", (side, side), (1, 2, 3))


def _decoded(size: int) -> object:
    file = io.BytesIO()
    _image(size).save(file, "PNG")
    return _of("PIL.Image").open(file).convert("RGB")


def _resized(size: int) -> object:
    image = _image(size)
    return image, image.resize((image.width // 2, image.height))


def _drawn(size: int) -> object:
    figure = _of("matplotlib.figure").Figure(figsize=(10, 10), dpi=(size / 400) ** 0.5)
    canvas = _of("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


def _table(size: int) -> Any:
    rows = _doubles(size).reshape(-1, 10)
    return _of("pandas").DataFrame(rows, columns=list("abcdefghij"))


def _read_table(size: int) -> object:
    file = io.BytesIO(b"0.123456789,1,2\n" * (size // 24))
    return _of("pandas").read_csv(file, header=None)


def _sparse(size: int) -> object:
    side = int(size // 240)
    made = _of("scipy.sparse").random(side, side, 10 / side, "csr", rng=0)
    return made @ made


def _arrow(size: int) -> object:
    return _of("pyarrow.compute").add(_of("pyarrow").array(_doubles(size)), 1.0)


CASES = {
    "tensors": Case("tensors", "torch", lambda size: torch.ones(size // 4)),
    "arrays": Case("arrays", "numpy", lambda size: _doubles(size) + 1),
    "sort": Case("`sort`, stable", "numpy", lambda size: np.sort(_doubles(size), kind="stable")),
    "grow": Case(
        "`fromiter`, growing",
        "numpy",
        lambda size: np.fromiter((0.5 for _ in range(size // 8)), dtype=np.float64),
    ),
    "short": Case(
        "arrays of 100 kB",
        "numpy",
        lambda size: [np.ones(100_000, "u1") for _ in range(size // 10**5)],
    ),
    "product": Case("matrix product", "numpy", lambda size: _square(size) @ _square(size)),
    "solve": Case("`linalg.svd`", "numpy", lambda size: np.linalg.svd(_square(size // 16))),
    "fft": Case("`fft.fft`", "numpy", lambda size: np.fft.fft(_doubles(size))),
    "scipy_fft": Case("`fft.fft`", "scipy", lambda size: _of("scipy.fft").fft(_doubles(size))),
    "sparse": Case("sparse product", "scipy", _sparse),
    "filter": Case(
        "`ndimage.gaussian_filter`",
        "scipy",
        lambda size: _of("scipy.ndimage").gaussian_filter(_square(size), 2.0),
    ),
    "neighbours": Case(
        "nearest neighbours' tree",
        "scikit-learn",
        lambda size: _of("sklearn.neighbors").KDTree(_doubles(size).reshape(-1, 8)),
    ),
    "decode": Case("a decoded image", "pillow", _decoded),
    "resize": Case("a resized image", "pillow", _resized),
    "draw": Case("a drawn figure", "matplotlib", _drawn),
    "table": Case("a sorted table", "pandas", lambda size: _table(size).sort_values("a")),
    "read": Case("`read_csv`", "pandas", _read_table),
    "arrow": Case("a computed column", "pyarrow", _arrow),
    "bytes": Case("`bytes`", "", lambda size: b"1" * size),
    "numbers": Case("a list of numbers", "", lambda size: [*map(float, range(size // 32))]),
}


def measure(name: str, size: int) -> dict[str, Any]:
    """Run a case in this process; return by how many bytes process and account grew."""
    case = CASES[name]
    case.run(size // 100)  # imports, and what a first call makes
    with RecyclingAllocator():
        before_bytes, held_bytes = process_memory.resident_bytes(), stats()["held_bytes.current"]
        process_memory.reset_peak()
        reset_peaks()
        kept = case.run(size)
        peak_bytes = process_memory.peak_bytes() - before_bytes
        account_bytes = stats()["held_bytes.peak"] - held_bytes
        after_bytes = process_memory.resident_bytes() - before_bytes
        outside_bytes = after_bytes - (stats()["held_bytes.current"] - held_bytes)
        del kept
    return {
        "peak_bytes": peak_bytes,
        "account_peak_bytes": account_bytes,
        "outside_peak_bytes": max(0, peak_bytes - account_bytes),
        "outside_kept_bytes": max(0, outside_bytes),
    }


def run(size: int, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Measure every case whose library is installed, with about ``size`` bytes; seconds each."""
    rows = []
    for name, case in CASES.items():
        on_progress(name)
        row = {"case": name, "does": case.does, "library": case.distribution or "Python"}
        row["version"] = case.version
        if case.version is not None:
            row |= _measured_apart(name, size)
        rows.append(row)
    seen = [row for row in rows if "peak_bytes" in row]
    worst = max(row["outside_peak_bytes"] / row["peak_bytes"] for row in seen if _is_inside(row))
    figures = {
        "cases_tried": len(seen),
        "cases_missing": len(rows) - len(seen),
        "outside_share_of_arrays": worst,
    }
    return BenchResult("outside", rows, figures, (f"about {size / MB:.0f} MB in each case",))


def _is_inside(row: dict[str, Any]) -> bool:
    return row["case"] in ("tensors", "arrays", "sort", "grow")


def _measured_apart(name: str, size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "daf_bench.memory.outside", name, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
