"""Both meters: to the byte from the account, and from the resident size where there is none."""

from __future__ import annotations

import pytest
import torch

from daf.memory import glibc, process_memory
from daf.memory.recycling_allocator import RecyclingAllocator, unsupported_reason
from daf.memory.statistics import ResidentMeter, open_meter

MIB = 2**20
needs_account = pytest.mark.skipif(
    unsupported_reason() is not None, reason=str(unsupported_reason())
)


@needs_account
def test_the_account_s_peaks_are_exact_and_start_anew_each_time() -> None:
    with RecyclingAllocator():
        before = torch.empty(3 * MIB, dtype=torch.uint8)
        meter = open_meter()
        meter.begin()
        first = torch.empty(4 * MIB, dtype=torch.uint8)
        passing = torch.empty(2 * MIB, dtype=torch.uint8)
        del passing
        assert meter.take_peak() == 6 * MIB
        assert meter.take_peak() == 4 * MIB  # what is still alive
        del first
        assert meter.take_peak() == 4 * MIB  # it was alive when this moment began
        assert meter.take_peak() == 0
        del before
        meter.take_peak()
        assert meter.take_peak() == -3 * MIB
        peaks = [5, 7]
        meter.finish(peaks)
        assert peaks == [5, 7]


@needs_account
def test_the_account_is_read_wherever_there_is_one() -> None:
    assert isinstance(open_meter(), ResidentMeter)
    with RecyclingAllocator():
        assert open_meter().is_exact
    assert isinstance(open_meter(), ResidentMeter)


def test_samples_are_raised_by_what_they_missed_of_the_highest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = iter([100, 130, 150, 120])
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(process_memory, "peak_bytes", lambda: 165)
    monkeypatch.setattr(process_memory, "reset_peak", lambda: None)
    meter = ResidentMeter()
    meter.begin()
    peaks = [meter.take_peak() for _ in range(3)]
    assert peaks == [30, 50, 20]
    meter.finish(peaks)
    assert peaks == [45, 65, 35]  # the highest is now the system's own, 65 above the level


def test_samples_that_missed_nothing_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter([100, 130])
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(process_memory, "peak_bytes", lambda: 120)
    monkeypatch.setattr(process_memory, "reset_peak", lambda: None)
    meter = ResidentMeter()
    meter.begin()
    peaks = [meter.take_peak()]
    meter.finish(peaks)
    assert peaks == [30]


@pytest.mark.skipif(not process_memory.peak_is_exact(), reason="no resettable high-water mark here")
def test_resident_peaks_see_what_came_and_went_between_two_samples() -> None:
    glibc.return_free_memory()  # a block placed in what earlier tests freed grows nothing
    meter = ResidentMeter()
    meter.begin()
    passing = torch.ones(64 * MIB, dtype=torch.uint8)
    del passing
    peaks = [meter.take_peak()]
    meter.finish(peaks)
    assert 60 * MIB < peaks[0] < 80 * MIB
