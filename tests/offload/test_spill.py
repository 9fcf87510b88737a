"""Spilled bytes come back as they were, whatever the disk does, or not at all and loudly."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daf.core.errors import SavedTensorError, SpillError
from daf.offload import spill_file
from daf.offload.spill import SpillOptions, SpillRecord, SpillStore, SpillWarning
from daf.offload.spill_file import ALIGNMENT_BYTES, Extents, SpillFile, open_disk_file

KIB = 1024


class MemoryFile:
    """A disk in memory whose every call can be made to fail, to stop half-way or to wait."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.write_answer: Callable[[int, int], int | OSError] = lambda _, count: count
        self.read_answer: Callable[[int, int], int | OSError] = lambda _, count: count
        self.settle_problem: OSError | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.writes: list[tuple[int, int]] = []
        self.reads: list[int] = []
        self.settled: list[tuple[int, int]] = []
        self.closed = False

    def write(self, content: memoryview, offset: int) -> int:
        assert self.may_write.wait(30)
        count = _told(self.write_answer(offset, len(content)))
        if len(self.content) < offset + count:
            self.content.extend(bytes(offset + count - len(self.content)))
        self.content[offset : offset + count] = content[:count]
        self.writes.append((offset, count))
        return count

    def settle(self, offset: int, nbytes: int) -> None:
        if self.settle_problem is not None:
            raise self.settle_problem
        self.settled.append((offset, nbytes))

    def read(self, into: memoryview, offset: int) -> int:
        count = min(_told(self.read_answer(offset, len(into))), len(self.content) - offset)
        into[:count] = self.content[offset : offset + count]
        self.reads.append(offset)
        return count

    def close(self) -> None:
        self.closed = True


def _told(answer: int | OSError) -> int:
    if isinstance(answer, OSError):
        raise answer
    return answer


@pytest.fixture
def file() -> MemoryFile:
    return MemoryFile()


@pytest.fixture
def make(file: MemoryFile) -> Iterator[Callable[..., SpillStore]]:
    made: list[SpillStore] = []

    def store(**options: Any) -> SpillStore:
        options = {"quota_bytes": 2**30} | options
        made.append(SpillStore(SpillOptions(**options), lambda: file))
        return made[-1]

    yield store
    file.may_write.set()
    for each in made:
        each.close()


def tensor(value: float, kib: int = 64) -> torch.Tensor:
    return torch.full((kib * KIB // 4,), value)


def put(store: SpillStore, value: torch.Tensor, site: str = "layer:op#0[0]") -> SpillRecord:
    record = store.put(value, site)
    assert record is not None
    record.users += 1
    return record


def flush(store: SpillStore) -> None:
    """Wait until everything is on the disk."""
    for reference in list(store._in_flight):
        record = reference()
        if record is not None and record.writing is not None:
            record.writing.exception(30)
    store.reap()


def put_and_flush(store: SpillStore, value: torch.Tensor) -> SpillRecord:
    record = put(store, value)
    flush(store)
    return record


def values(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0).set_(storage)


# --- round trips ----------------------------------------------------------------------------


def test_bytes_come_back_from_a_real_disk_and_the_tensor_is_let_go(tmp_path: Path) -> None:
    store = SpillStore(SpillOptions(directory=tmp_path, allow_memory=True))
    value = torch.randn(3 * 2**20)  # several chunks, and a ragged last one
    expected = value.clone()
    record = put(store, value)
    flush(store)
    assert record.content is None
    assert store.stored_bytes == value.nbytes
    assert store.in_memory_bytes == 0
    del value
    for _ in range(2):
        assert torch.equal(values(store.load(record)), expected)
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_what_still_waits_is_given_back_without_reading(make: Any, file: MemoryFile) -> None:
    store, value = make(), tensor(3.0)
    file.may_write.clear()
    record = put(store, value)
    assert store.in_memory_bytes == value.nbytes
    assert store.stored_bytes == 0
    assert store.load(record).data_ptr() == value.data_ptr()
    file.may_write.set()
    flush(store)
    assert store.in_memory_bytes == 0
    assert torch.equal(values(store.load(record)), tensor(3.0))
    assert len(file.reads) == 1


def test_no_more_waits_than_allowed(make: Any, file: MemoryFile) -> None:
    store = make(in_flight_bytes=128 * KIB)
    waiting: list[int] = []
    file.write_answer = lambda _, count: waiting.append(store._waiting_bytes) or count
    records = [put(store, tensor(float(i))) for i in range(12)]
    # One more than allowed at the moment it comes; put returns only when that is over.
    assert max(waiting) <= 192 * KIB
    assert store._waiting_bytes <= 128 * KIB
    flush(store)
    assert store.stored_bytes == 12 * 64 * KIB
    for i, record in enumerate(records):
        assert torch.equal(values(store.load(record)), tensor(float(i)))


@pytest.mark.parametrize(("spare", "waiting"), [(0, 0), (-1, 0), (160, 64), (10_000, 128)])
def test_what_nobody_else_counts_on_bounds_both_ways(
    make: Any, file: MemoryFile, spare: int, waiting: int
) -> None:
    store = make(in_flight_bytes=128 * KIB, read_ahead_bytes=128 * KIB)
    store.bound(spare * KIB)
    left: list[int] = []
    records = []
    for i in range(6):
        records.append(put(store, tensor(float(i))))
        left.append(store._waiting_bytes)
    assert max(left) <= waiting * KIB
    flush(store)
    assert torch.equal(values(store.load(records[5])), tensor(5.0))
    assert store.in_memory_bytes == len(store._ahead) * 64 * KIB == waiting * KIB
    store.bound(None)
    assert torch.equal(values(store.load(records[3])), tensor(3.0))
    assert len(store._ahead) == 2


def test_backward_finds_the_ones_before_read_ahead_within_bounds(
    make: Any, file: MemoryFile
) -> None:
    store = make(read_ahead_bytes=192 * KIB)
    records = [put(store, tensor(float(i))) for i in range(8)]
    flush(store)
    for i in reversed(range(8)):
        assert torch.equal(values(store.load(records[i])), tensor(float(i)))
        assert sorted(store._ahead) == list(range(max(0, i - 3), i))
        assert store.in_memory_bytes == len(store._ahead) * 64 * KIB
        del records[i]
    # Each was read once, the last first.
    assert file.reads == [i * 64 * KIB for i in reversed(range(8))]
    assert store.stored_bytes == 0
    assert store.in_memory_bytes == 0


def test_what_was_read_ahead_can_be_let_go_and_is_read_again(make: Any, file: MemoryFile) -> None:
    store = make()
    records = [put(store, tensor(float(i))) for i in range(4)]
    flush(store)
    store.load(records[3])
    assert store.in_memory_bytes == 3 * 64 * KIB
    store.drop_read_ahead()
    assert store.in_memory_bytes == 0
    assert torch.equal(values(store.load(records[2])), tensor(2.0))


def test_a_storage_that_two_saves_share_is_read_once_for_both(make: Any, file: MemoryFile) -> None:
    store = make()
    record = put(store, tensor(5.0))
    record.users += 1
    flush(store)
    first, second = store.load(record), store.load(record)
    assert first.data_ptr() == second.data_ptr()
    assert len(file.reads) == 1
    assert not store._shared  # both have it; nobody keeps it for a third
    store.load(record)
    assert len(file.reads) == 2


def test_a_storage_changed_while_it_is_written_is_refused(make: Any, file: MemoryFile) -> None:
    store, value = make(), tensor(1.0)
    file.may_write.clear()
    record = put(store, value)
    value.add_(1)
    with pytest.raises(SavedTensorError, match=r"saved at layer:op#0\[0\]"):
        store.load(record)
    file.may_write.set()
    flush(store)
    with pytest.raises(SavedTensorError):
        store.load(record)


def test_a_storage_changed_after_it_was_written_comes_back_as_it_was(make: Any) -> None:
    store, value = make(), tensor(1.0)
    record = put(store, value)
    flush(store)
    value.add_(1)
    assert torch.equal(values(store.load(record)), tensor(1.0))


def test_released_places_are_used_again(make: Any, file: MemoryFile) -> None:
    store = make()
    kept = put(store, tensor(0.0))
    for i in range(20):
        record = put(store, tensor(float(i)))
        flush(store)
        assert torch.equal(values(store.load(record)), tensor(float(i)))
        del record
    assert len(file.content) == 2 * 64 * KIB
    assert torch.equal(values(store.load(kept)), tensor(0.0))


def test_a_record_dropped_before_its_turn_is_never_written(make: Any, file: MemoryFile) -> None:
    store = make()
    file.may_write.clear()
    first, second, third = (put(store, tensor(float(i))) for i in range(3))
    del second
    gc.collect()
    assert store.in_memory_bytes == 2 * 64 * KIB
    file.may_write.set()
    flush(store)
    assert [offset for offset, _ in file.writes] == [0, 128 * KIB]
    assert torch.equal(values(store.load(third)), tensor(2.0))
    assert torch.equal(values(store.load(first)), tensor(0.0))


def test_every_byte_is_settled_before_memory_is_let_go(make: Any, file: MemoryFile) -> None:
    store = make()
    record = put(store, torch.zeros(9 * 2**20, dtype=torch.uint8))
    chunk = 4 * 2**20
    flush(store)
    assert record.content is None
    assert file.settled == [(0, chunk), (chunk, chunk), (2 * chunk, 2**20)]


# --- disks that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failing_write_leaves_the_tensor_in_memory_with_one_warning(
    make: Any, file: MemoryFile, code: int
) -> None:
    store = make()
    good = put(store, tensor(1.0))
    flush(store)
    file.write_answer = lambda *_: OSError(code, os.strerror(code))
    file.may_write.clear()
    bad = [put(store, tensor(2.0 + i)) for i in range(2)]
    file.may_write.set()
    with pytest.warns(SpillWarning, match=os.strerror(code)) as caught:
        flush(store)
    assert len(caught) == 1
    for i, record in enumerate(bad):
        assert torch.equal(values(store.load(record)), tensor(2.0 + i))
    assert store.in_memory_bytes == 2 * 64 * KIB
    assert store.put(tensor(4.0), "later") is None  # the caller keeps it
    assert torch.equal(values(store.load(good)), tensor(1.0))
    del bad, record
    assert store.in_memory_bytes == 0


def test_a_full_disk_takes_what_fits_where_others_were(make: Any, file: MemoryFile) -> None:
    store = make()
    first = put(store, tensor(1.0))
    flush(store)
    file.write_answer = lambda offset, count: (
        count if offset == 0 else OSError(errno.ENOSPC, "No space left on device")
    )
    with pytest.warns(SpillWarning):
        second = put_and_flush(store, tensor(2.0))
    del first
    third = put(store, tensor(3.0))
    flush(store)
    assert third.content is None
    assert torch.equal(values(store.load(third)), tensor(3.0))
    assert torch.equal(values(store.load(second)), tensor(2.0))


def test_trouble_that_shows_only_at_the_disk_counts_too(make: Any, file: MemoryFile) -> None:
    store = make()
    file.settle_problem = OSError(errno.EIO, "Input/output error")
    with pytest.warns(SpillWarning, match="Input/output error"):
        record = put_and_flush(store, tensor(1.0))
    assert record.content is not None
    assert torch.equal(values(store.load(record)), tensor(1.0))


def test_short_writes_and_reads_are_continued(make: Any, file: MemoryFile) -> None:
    file.write_answer = file.read_answer = lambda _, count: min(count, 1000)
    store, value = make(), torch.randn(16 * KIB)
    record = put(store, value)
    flush(store)
    assert torch.equal(values(store.load(record)), value)
    assert len(file.writes) == 66


def test_a_disk_that_takes_nothing_is_full(make: Any, file: MemoryFile) -> None:
    file.write_answer = lambda *_: 0
    store = make()
    with pytest.warns(SpillWarning, match="no more bytes"):
        record = put_and_flush(store, tensor(1.0))
    assert torch.equal(values(store.load(record)), tensor(1.0))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_flipped_bit_is_an_error_that_says_where(
    make: Any, file: MemoryFile, ahead: bool
) -> None:
    store = make()
    records = [put(store, tensor(float(i)), f"block.{i}:relu#0[0]") for i in range(3)]
    flush(store)
    file.content[64 * KIB + 777] ^= 4
    if ahead:
        store.load(records[2])
    with pytest.raises(SpillError, match=r"block\.1:relu.*65.5 kB at offset 65536 .*checksum"):
        store.load(records[1])
    assert torch.equal(values(store.load(records[0])), tensor(0.0))


def test_a_read_that_fails_or_ends_early_is_an_error_that_says_where(
    make: Any, file: MemoryFile
) -> None:
    store = make()
    record = put(store, tensor(1.0))
    flush(store)
    file.read_answer = lambda *_: OSError(errno.EIO, "Input/output error")
    with pytest.raises(SpillError, match=r"layer:op#0\[0\].* offset 0 .*Input/output error"):
        store.load(record)
    file.read_answer = lambda *_: 0
    with pytest.raises(SpillError, match="the file ends at 0"):
        store.load(record)


def test_beyond_the_quota_tensors_stay_with_their_caller(make: Any, file: MemoryFile) -> None:
    store = make(quota_bytes=130 * KIB)
    first, second = put(store, tensor(1.0)), put(store, tensor(2.0))
    with pytest.warns(SpillWarning, match=r"its 133 kB are full"):
        assert store.put(tensor(3.0), "third") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.put(tensor(4.0), "fourth") is None
    flush(store)
    del first
    assert store.put(tensor(5.0), "fifth") is not None
    assert len(file.content) <= 130 * KIB
    assert torch.equal(values(store.load(second)), tensor(2.0))


# --- the file -------------------------------------------------------------------------------


def test_the_file_is_its_owner_s_alone_and_has_no_name(tmp_path: Path) -> None:
    file = open_disk_file(tmp_path, allow_memory=True)
    found = os.fstat(file._descriptor)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_a_directory_in_memory_is_refused_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_file, "file_system_of", lambda _: "tmpfs")
    with pytest.raises(SpillError, match=r"which is a tmpfs: it lies in memory.*/var/tmp"):
        open_disk_file(tmp_path, allow_memory=False)
    open_disk_file(tmp_path, allow_memory=True).close()


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="Linux tells of its mounts")
def test_the_innermost_mount_tells_the_file_system() -> None:
    assert spill_file.file_system_of(Path("/proc/self")) == "proc"
    assert spill_file.file_system_of(Path("/")) not in ("proc", "")


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="No such file or directory; name another directory"):
        open_disk_file(tmp_path / "nowhere", allow_memory=True)


def test_nothing_is_opened_before_something_is_spilled(file: MemoryFile) -> None:
    opened: list[MemoryFile] = []
    store = SpillStore(SpillOptions(quota_bytes=2**30), lambda: opened.append(file) or file)
    assert store.in_memory_bytes == 0
    store.reset_peak()
    assert opened == []
    put(store, tensor(1.0))
    flush(store)
    assert opened == [file]
    store.close()
    assert file.closed


def test_without_sync_file_range_the_whole_file_is_synchronised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_file, "_sync_file_range", lambda: None)
    file, content = SpillFile(tmp_path), memoryview(bytes(range(256)) * 64)
    assert file.write(content, 4096) == len(content)
    file.settle(4096, len(content))
    back = bytearray(len(content))
    assert file.read(memoryview(back), 4096) == len(content)
    assert back == content
    file.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_spills_to_a_file_of_its_own(tmp_path: Path) -> None:
    store = SpillStore(SpillOptions(directory=tmp_path, allow_memory=True))
    ours = put(store, tensor(1.0))
    flush(store)
    child = os.fork()
    if child == 0:
        theirs = put(store, tensor(2.0))
        flush(store)
        right = torch.equal(values(store.load(theirs)), tensor(2.0))
        right &= torch.equal(values(store.load(ours)), tensor(1.0))
        right &= theirs.space is not ours.space
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(values(store.load(ours)), tensor(1.0))
    store.close()


# --- random operations ----------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60))
def test_extents_never_overlap_and_free_ones_join(operations: list[tuple[bool, int]]) -> None:
    extents, taken = Extents(quota_bytes=60 * ALIGNMENT_BYTES), dict[int, int]()
    for is_take, number in operations:
        if is_take:
            offset = extents.take(number + 1)
            if offset is not None:
                taken[offset] = number + 1
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            extents.give_back(offset, taken.pop(offset))
        spans = sorted((at, at + spill_file.rounded(size)) for at, size in taken.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert extents.used_bytes == sum(end - start for start, end in spans)
        assert extents.end <= extents.quota_bytes
        free = extents._free
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(free))
    for offset, size in taken.items():
        extents.give_back(offset, size)
    assert extents.used_bytes == 0
    assert extents.take(extents.end or 1) == 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    quota_kib=st.sampled_from([100, 400, 10_000]),
    failing=st.sampled_from([None, errno.ENOSPC, errno.EIO]),
)
def test_whatever_is_asked_in_whatever_order_bytes_are_never_wrong(
    seed: int, quota_kib: int, failing: int | None
) -> None:
    choose, file = random.Random(seed), MemoryFile()
    options = SpillOptions(
        quota_bytes=quota_kib * KIB, in_flight_bytes=64 * KIB, read_ahead_bytes=48 * KIB
    )
    store = SpillStore(options, lambda: file)
    model: list[tuple[SpillRecord, torch.Tensor]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpillWarning)
        for step in range(80):
            action = choose.choice("ppplllrrda")
            if action == "p":
                value = torch.full((choose.randint(1, 8000),), float(step))
                record = store.put(value, f"site {step}")
                if record is not None:
                    record.users += choose.randint(1, 2)
                    model.append((record, value.clone()))
            elif action == "l" and model:
                record, expected = choose.choice(model)
                assert torch.equal(values(store.load(record)), expected)
            elif action == "r" and model:
                del model[choose.randrange(len(model))]
                record = None
            elif action == "d":
                store.drop_read_ahead()
            elif action == "a" and failing is not None and step > 40:
                file.write_answer = lambda *_: OSError(failing, os.strerror(failing))
            assert len(file.content) <= quota_kib * KIB
            ahead = sum(size for size, _ in store._ahead.values())
            assert ahead <= 48 * KIB
        flush(store)
        held = {id(record): record.nbytes for record, _ in model if record.content is not None}
        store.drop_read_ahead()
        assert store.in_memory_bytes == sum(held.values())
        assert store.stored_bytes == sum(
            record.nbytes for record, _ in model if record.content is None
        )
        for record, expected in model:
            assert torch.equal(values(store.load(record)), expected)
    record = None
    model.clear()
    assert store.stored_bytes == store.in_memory_bytes == 0
    store.close()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_record_that_a_waiting_thread_still_holds_is_counted_out_once(
    tmp_path: Path, is_written: bool
) -> None:
    """Its last owner's finalizer runs in one thread while another waits for its writing."""
    store = SpillStore(SpillOptions(directory=tmp_path, allow_memory=True))
    busy = threading.Event()
    put_and_flush(store, tensor(0.0, 4))  # opens the file
    assert store._space is not None
    store._space.writer.submit(busy.wait, 30)
    record = put(store, tensor(1.0, 8))
    waiting = store._oldest()  # as whoever waits for room gets it
    assert waiting is record
    assert waiting.writing is not None
    if is_written:
        busy.set()
        waiting.writing.result(30)
    store.drop(record)  # as the finalizer does
    busy.set()
    next_one = put_and_flush(store, tensor(2.0, 4))
    assert store.stored_bytes == next_one.nbytes
    assert store.in_memory_bytes == 0
    assert bool((values(store.load(next_one)) == 2.0).all())
    store.close()


def test_threads_that_spill_and_load_at_once_get_their_own_bytes(tmp_path: Path) -> None:
    store = SpillStore(
        SpillOptions(directory=tmp_path, allow_memory=True, in_flight_bytes=256 * KIB)
    )
    wrong: list[str] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        mine: list[tuple[SpillRecord, float]] = []
        for step in range(60):
            value = number + step / 100
            mine.append((put(store, tensor(value, choose.randint(1, 64))), value))
            record, expected = choose.choice(mine)
            found = values(store.load(record))
            if not bool((found == torch.tensor(expected)).all()):
                wrong.append(f"thread {number}, step {step}")
            if len(mine) > 8:
                mine.pop(choose.randrange(len(mine)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    gc.collect()
    assert store.stored_bytes == store.in_memory_bytes == 0
    store.close()


def test_the_last_reference_may_go_while_the_store_is_busy(make: Any) -> None:
    store = make()
    record = put_and_flush(store, tensor(1.0))
    assert record.content is None
    with store._lock:  # as another thread that waits for memory would hold it
        del record
        gc.collect()
    assert store.stored_bytes == 0
    again = put(store, tensor(2.0))
    assert again.offset == 0
