"""Measured speeds: of every method, from the observed step where it did enough; no file stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from daf.core.policy import Method
from daf.offload.spill import SpillOptions
from daf.profiling import device_speeds as speeds
from daf.profiling.device_speeds import ENOUGH_BYTES, PROBE_ELEMENTS, _probe_elements, device_speeds
from daf.saved_tensors.observation import MethodTime, Observation

CODED = {Method.ROTATED, Method.MINMAX, Method.MASK}


@pytest.fixture(autouse=True)
def _a_small_disk_probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(speeds, "DISK_PROBE_BYTES", 1 << 16)
    speeds._disk.cache_clear()
    yield
    speeds._disk.cache_clear()


def seen(nbytes: int, ms: float) -> Observation:
    found = Observation(4)
    found.encode[Method.ROTATED] = MethodTime(nbytes, ms, nbytes, ms)
    found.decode[Method.KEEP] = MethodTime(10 * ENOUGH_BYTES, 1.0, 10 * ENOUGH_BYTES, 1.0)
    return found


def test_every_speed_is_positive_and_finite() -> None:
    found = device_speeds(Observation(1), None)
    assert set(found.encode) >= CODED
    assert set(found.decode) >= CODED
    for speed in (*found.encode.values(), *found.decode.values(), found.copy):
        assert 1e6 < speed < 1e13  # bytes per second, on anything that runs this
    assert found.disk_write == found.disk_read == found.copy


def test_an_observed_step_that_coded_enough_is_believed() -> None:
    probed = device_speeds(Observation(1), None)
    found = device_speeds(seen(ENOUGH_BYTES, 2.0), None)
    assert found.encode[Method.ROTATED] == pytest.approx(ENOUGH_BYTES * 500.0)
    assert found.encode[Method.MINMAX] == probed.encode[Method.MINMAX]
    assert Method.KEEP not in found.decode


def test_one_that_coded_too_little_is_not() -> None:
    probed = device_speeds(Observation(1), None)
    found = device_speeds(seen(ENOUGH_BYTES - 1, 2.0), None)
    assert found.encode == probed.encode
    assert device_speeds(seen(ENOUGH_BYTES, 0.0), None).encode == probed.encode


def test_what_a_step_did_not_use_is_taken_from_what_is_known_of_the_model() -> None:
    """A fused step codes inside its operators; the model's own step timed those codes apart."""
    own = device_speeds(seen(ENOUGH_BYTES, 2.0), None)
    known = replace(own, encode={**own.encode, Method.MINMAX: 7e9}, decode={Method.MASK: 3e9})
    found = device_speeds(seen(ENOUGH_BYTES, 4.0), None, known)
    assert found.encode[Method.MINMAX] == 7e9
    assert found.decode[Method.MASK] == 3e9
    assert found.encode[Method.ROTATED] == pytest.approx(ENOUGH_BYTES * 250.0)  # seen, now
    assert device_speeds(Observation(1), None, known).encode == known.encode


def test_the_disk_is_measured_once_a_folder_and_no_file_stays(tmp_path: Path) -> None:
    found = device_speeds(Observation(1), SpillOptions(tmp_path))
    assert found.disk_write > 0
    assert found.disk_read > 0
    assert list(tmp_path.iterdir()) == []
    again = device_speeds(Observation(1), SpillOptions(tmp_path))
    assert (again.disk_write, again.disk_read) == (found.disk_write, found.disk_read)
    assert speeds._disk.cache_info().misses == 1


def test_a_gpu_is_probed_with_as_much_as_there_is_room_for() -> None:
    """Four tensors of so many floats of four bytes are alive at most."""
    gpu, all_ = torch.device("cuda", 0), 16 * PROBE_ELEMENTS
    for room_bytes in (0, 100 * 2**20, 4 * 4 * all_ - 1, 4 * 4 * all_, 2**40):
        elements = _probe_elements(gpu, room_bytes)
        assert elements == PROBE_ELEMENTS or 4 * 4 * elements <= room_bytes
        assert elements == all_ or 2 * 4 * 4 * elements > room_bytes
    assert _probe_elements(torch.device("cpu"), 2**40) == PROBE_ELEMENTS
