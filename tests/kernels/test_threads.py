"""Threads change the speed, never the bytes; forks and concurrent callers are safe."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import native_calls
import numpy as np
import pytest
import torch
from daf._native import team_threads
from guarded import FlatCode

from daf.core.code_format import ElementType

COUNT = 1_000_003
KEY = 99


def encoded(source: np.ndarray, threads: int, key: int = KEY) -> bytes:
    room, kind = FlatCode(len(source), 2), ElementType.FLOAT32
    native_calls.encode_rotated(source.ctypes.data, kind, room.fields, key, threads)
    back = np.zeros_like(source)
    native_calls.decode_rotated(room.fields, key, back.ctypes.data, kind, threads)
    return room.code.planes.tobytes() + room.code.headers.tobytes() + back.tobytes()


@pytest.fixture(scope="module")
def source(cases) -> np.ndarray:
    return cases.smooth(COUNT)


@pytest.mark.parametrize("threads", [2, 3, 8, 1000])
def test_bytes_do_not_depend_on_threads(source, threads) -> None:
    assert encoded(source, threads) == encoded(source, 1)


def test_concurrent_callers(source) -> None:
    expected = {key: encoded(source, 1, key) for key in range(6)}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda job: encoded(source, 1 + job % 3, job % 6), range(24)))
    assert all(bytes_ == expected[job % 6] for job, bytes_ in enumerate(found))


def test_a_refusal_by_one_thread_is_everybody_s(source) -> None:
    broken, lines = source.copy(), np.arange(47, dtype=np.float32)
    room = FlatCode(COUNT, 1, headers=False)
    broken[-1] = np.nan
    for data, coded in ((source, True), (broken, False)):
        at = (data.ctypes.data, ElementType.FLOAT32, room.fields, lines.ctypes.data)
        assert native_calls.encode_derivative(*at, 1, 3) is coded


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("threads", [2, 3])
def test_a_forked_child_has_threads_of_its_own(source, threads) -> None:
    expected = encoded(source, threads)
    child = os.fork()
    if child == 0:
        os._exit(0 if encoded(source, threads) == expected and not team_threads() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert encoded(source, threads) == expected


IN_A_PROCESS_OF_ITS_OWN = """
import os
import numpy as np
import torch
from daf.kernels import Codec, PageFields
from daf.kernels.cpu.codecs import encode
from daf.kernels.cpu.job import Job

def tasks():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
torch.ones(1 << 20).add(1)
source, words = np.ones(1 << 20, np.float32), np.empty(1 << 15, np.uint32)
fields = PageFields.flat(words.ctypes.data, 1 << 20, 1)
mask = Job(2, 1 << 20, source=source.ctypes.data, pages=fields)
before = tasks()
encode(Codec.MASK, mask)
with_team = tasks()
encode(Codec.MASK, mask._replace(threads=3))
print(before, with_team, tasks())
"""


@pytest.mark.skipif(
    "OpenMP" not in torch.__config__.parallel_info() or not os.path.exists("/proc/self/task"),
    reason="PyTorch computes without OpenMP here, or its threads cannot be counted",
)
def test_pytorch_s_own_threads_compute_and_no_others_outlive_a_call() -> None:
    assert team_threads() == torch.get_num_threads()
    found = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], capture_output=True, text=True, check=True
    )
    before, with_team, beyond = map(int, found.stdout.split())
    assert with_team == beyond == before


def test_flushed_denormals_of_the_caller_change_nothing(cases) -> None:
    values = cases.wild(600_000) * np.float32(2.0**-100)
    expected = encoded(values, 1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert encoded(values, 1) == expected
        assert encoded(values, 3) == expected
        assert float(torch.tensor(1e-40) + 0) == 0, "the caller's own mode must come back"
    finally:
        torch.set_flush_denormal(False)
