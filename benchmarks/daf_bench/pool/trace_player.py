"""Plays a trace on one contestant; run as a script, so that neither torch nor DAF is loaded.

``pool_player.py EXTENSION CONTESTANT PAGE_BYTES CAP_BYTES OPERATIONS SAMPLES``: both last are
``.npy`` files; seconds go to stdout.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

import numpy as np

# benchmarks/native/pool_measure.h: Operation and Sample.
OPERATION = np.dtype(
    [
        ("count", "u8"),
        ("importance", "f8"),
        ("id", "u4"),
        ("action", "u4"),
        ("bits", "u4"),
        ("minimum_bits", "u4"),
    ]
)
SAMPLE = np.dtype(
    [
        ("payload_bytes", "u8"),
        ("held_bytes", "u8"),
        ("evicted_pages", "u8"),
        ("resident_bytes", "u8"),
    ]
)


def main(arguments: list[str]) -> None:
    """Play and write the samples."""
    extension, contestant, page_bytes, cap_bytes, given, wanted = arguments
    operations = np.ascontiguousarray(np.load(given))
    samples = np.zeros(len(operations), SAMPLE)
    samples.view("u8")[:] = 1  # in memory before anything is counted
    replay = _load(extension).replay
    start = time.perf_counter()
    replay(
        contestant,
        int(page_bytes),
        int(cap_bytes) or None,
        operations.ctypes.data,
        len(operations),
        samples.ctypes.data,
    )
    print(time.perf_counter() - start)
    np.save(wanted, samples)


def _load(extension: str) -> Any:
    spec = importlib.util.spec_from_file_location("daf_bench._native", extension)
    if spec is None or spec.loader is None:
        raise ImportError(f"{extension} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
