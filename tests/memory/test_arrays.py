"""NumPy's large arrays: in the account, under its limit, right whoever frees them and when."""

from __future__ import annotations

import gc
import io
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from daf._native import allocator as native
from torch import nn

from daf.memory import glibc, process_memory
from daf.memory.recycling_allocator import RecyclingAllocator, unsupported_reason
from daf.memory.statistics import audit, stats
from daf.session.session import Session

MIB = 2**20

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.usefixtures("account_left_empty"),
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]


def live_bytes() -> int:
    return stats()["live_bytes.current"]


def held_bytes() -> int:
    return stats()["held_bytes.current"]


def ones(mib: float) -> np.ndarray:
    return np.ones(int(mib * MIB), dtype=np.uint8)


def filled(array: np.ndarray, value: int) -> bool:
    return bool(array.min() == array.max() == value)  # without an array of its own


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def make_by_ones() -> np.ndarray:
    return ones(3)


def make_by_zeros() -> np.ndarray:
    return np.zeros(3 * MIB, dtype=np.uint8)


def make_by_empty() -> np.ndarray:
    return np.empty((3, MIB), dtype=np.uint8)


def make_by_concatenation() -> np.ndarray:
    return np.concatenate([np.zeros(64, dtype=np.uint8)] * (3 * MIB // 64))


def make_by_resizing() -> np.ndarray:
    return np.resize(np.arange(7, dtype=np.uint8), 3 * MIB)


def make_by_loading() -> np.ndarray:
    file = io.BytesIO()
    np.save(file, np.arange(3 * MIB // 8))
    file.seek(0)
    loaded = np.load(file)
    assert loaded[-1] == 3 * MIB // 8 - 1
    return loaded


def make_from_an_iterator() -> np.ndarray:
    return np.fromiter((3 for _ in range(3 * MIB // 8)), dtype=np.int64)


@pytest.mark.parametrize(
    "make",
    [
        make_by_ones,
        make_by_zeros,
        make_by_empty,
        make_by_concatenation,
        make_by_resizing,
        make_by_loading,
        make_from_an_iterator,
    ],
    ids=lambda make: make.__name__,
)
def test_however_an_array_is_made_its_bytes_are_in_the_account(
    make: Callable[[], np.ndarray],
) -> None:
    with RecyclingAllocator():
        before = live_bytes()
        array = make()
        assert array.nbytes == 3 * MIB
        assert 0 <= live_bytes() - before - 3 * MIB < 8  # `np.resize` makes whole copies
        del array
        assert live_bytes() == before


def test_below_128_kib_arrays_stay_the_c_library_s() -> None:
    with RecyclingAllocator():
        before = stats()
        kept = [np.ones(128 * 1024 - 1, dtype=np.uint8) for _ in range(10)]
        assert stats() == before
        del kept


def test_zeros_are_zeros_after_blocks_full_of_something_else() -> None:
    with RecyclingAllocator():
        for size in (128 * 1024, MIB, 3 * MIB + 12345, 9 * MIB):
            dirty = np.full(size, 255, dtype=np.uint8)
            hits = stats()["hits"]
            del dirty
            zeros = np.zeros(size, dtype=np.uint8)
            assert stats()["hits"] == hits + 1  # the same block again
            assert not zeros.any()
            del zeros
        torch.full((8 * MIB,), 7, dtype=torch.uint8)
        assert not np.zeros((2, MIB), dtype=np.float32).any()


def test_too_many_zeros_are_numpy_s_own_error() -> None:
    with RecyclingAllocator(), pytest.raises((MemoryError, ValueError)):
        np.zeros((2**40, 2**20), dtype=np.float64)


@pytest.mark.parametrize(
    "sizes", [(1, 3, 9), (9, 3, 1), (0.01, 5, 0.01), (2, 2.001, 1.999), (0.125, 0.25, 0.124)]
)
@pytest.mark.parametrize("born_before", [False, True])
def test_a_resized_array_keeps_its_contents(sizes: tuple[float, ...], born_before: bool) -> None:
    array = np.arange(int(sizes[0] * MIB) // 8)
    with RecyclingAllocator():
        before = live_bytes()
        if not born_before:
            array = np.arange(int(sizes[0] * MIB) // 8)
        for size in sizes[1:]:
            count, kept = int(size * MIB) // 8, min(array.size, int(size * MIB) // 8)
            dirty = np.full(count, -1)
            del dirty
            array.resize(count, refcheck=False)
            assert np.array_equal(array[:kept], np.arange(kept))
            assert not array[kept:].any()
            array[kept:] = np.arange(kept, count)
        del array
        assert live_bytes() == before


def test_a_shrunk_array_gives_back_the_rest() -> None:
    with RecyclingAllocator() as allocator:
        array, before = ones(20), held_bytes()
        array.resize(4 * MIB + 100, refcheck=False)
        assert before - held_bytes() >= 16 * MIB - 4096
        allocator.limit_bytes = held_bytes()
        array.resize(3 * MIB, refcheck=False)  # no room is needed for less
        assert filled(array, 1)
        allocator.limit_bytes = None
        del array


def test_beyond_the_limit_it_is_a_memory_error_and_nothing_changes() -> None:
    with RecyclingAllocator() as allocator:
        array = ones(4)
        allocator.limit_bytes = held_bytes() + 10 * MIB
        refusals = stats()["refusals"]
        for refused in (lambda: ones(11), lambda: np.zeros(11 * MIB, dtype=np.uint8)):
            with pytest.raises(MemoryError, match="Unable to allocate"):
                refused()
        with pytest.raises(MemoryError):
            array.resize(11 * MIB, refcheck=False)
        assert filled(array, 1)
        assert stats()["refusals"] == refusals + 3
        assert filled(ones(9), 1)
        with pytest.raises(RuntimeError, match="DAF's limit"):
            torch.ones(11 * MIB)
        with pytest.raises(MemoryError):
            ones(11)
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        torch.empty(2**55)  # refused by the system
    assert "DAF" not in str(error.value)
    del array


def test_the_reclaim_hook_is_asked_before_an_array_is_refused() -> None:
    kept = [torch.empty(0)]
    asked: list[int] = []

    def reclaim(missing_bytes: int) -> int:
        asked.append(missing_bytes)
        scratch = ones(1)  # what makes room is served
        assert filled(scratch, 1)
        return kept.pop().nbytes if kept else 0

    with RecyclingAllocator(reclaim=reclaim) as allocator:
        kept[0] = torch.ones(8 * MIB, dtype=torch.uint8)
        allocator.limit_bytes = held_bytes() + 2 * MIB
        assert filled(ones(6), 1)
        assert len(asked) == 1
        assert 4 * MIB <= asked[0] < 5 * MIB


def test_arrays_and_tensors_recycle_each_other_s_blocks() -> None:
    with RecyclingAllocator():
        address = ones(8).ctypes.data
        tensor = torch.zeros(8 * MIB, dtype=torch.uint8)
        assert tensor.data_ptr() == address
        shared = torch.from_numpy(ones(3))
        assert int(shared.sum()) == 3 * MIB
        del tensor, shared


def test_in_every_thread_arrays_are_counted_and_refused() -> None:
    found: list[object] = []

    def work() -> None:
        before = live_bytes()
        array = ones(2)
        found.append(live_bytes() - before)
        del array
        try:
            ones(100)
        except MemoryError as error:
            found.append(type(error).__mro__[1])

    started = threading.Event()
    early = threading.Thread(target=lambda: (started.wait(), work()))
    early.start()  # it is older than the allocator
    with RecyclingAllocator() as allocator:
        allocator.limit_bytes = held_bytes() + 50 * MIB
        started.set()
        early.join()
        late = threading.Thread(target=work)
        late.start()
        late.join()
    assert found == [2 * MIB, MemoryError] * 2


def test_whatever_is_older_or_outlives_it_is_right_in_any_order_and_thread() -> None:
    """Arrays from before, inside and after, freed and resized by several threads while it goes."""
    kept: list[tuple[np.ndarray, int]] = []
    lock, stop = threading.Lock(), threading.Event()
    wrong: list[object] = []

    def churn(seed: int) -> None:
        choose = random.Random(seed)
        while not stop.is_set():
            value = choose.randrange(1, 256)
            made = np.full(choose.randrange(1000, 2 * MIB), value, dtype=np.uint8)
            with lock:
                kept.append((made, value))
                old, expected = kept.pop(choose.randrange(len(kept)))
            del made
            if choose.random() < 0.3:
                old.resize(choose.randrange(1000, 2 * MIB), refcheck=False)
                grown = np.flatnonzero(old != expected)
                if grown.size and old[grown[0] :].any():
                    wrong.append(expected)
            elif not filled(old, expected):
                wrong.append(expected)
            with lock:
                if len(kept) > 20:
                    kept.pop(0)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(150):
        with RecyclingAllocator(cap_bytes=8 * MIB):
            stop.wait(0.005)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(filled(array, value) for array, value in kept)
    random.Random(7).shuffle(kept)
    while kept:
        kept.pop()


def test_the_account_counts_arrays_once() -> None:
    with RecyclingAllocator():
        before = audit()
        kept = [ones(5), np.zeros(7 * MIB, dtype=np.uint8), np.empty(9 * MIB, dtype=np.uint8)]
        found = audit()
        assert found.held_bytes - before.held_bytes == pytest.approx(21 * MIB, abs=MIB)
        # Zeros and what is never written are resident, too.
        assert found.resident_bytes - before.resident_bytes == pytest.approx(21 * MIB, abs=MIB)
        assert found.rest_bytes == pytest.approx(before.rest_bytes, abs=MIB)
        assert found.other_bytes == pytest.approx(before.other_bytes, abs=MIB)
        del kept


def test_many_short_arrays_leave_the_process_its_mappings() -> None:
    """Linux grants a process some 65,000 mappings (vm.max_map_count)."""
    mappings = Path("/proc/self/maps")
    with RecyclingAllocator():
        before = len(mappings.read_text().splitlines())
        kept = [np.ones(128 * 1024 + index, dtype=np.uint8) for index in range(1000)]
        assert len(mappings.read_text().splitlines()) - before < 50
        del kept


def test_numpy_that_is_imported_later_is_redirected_at_the_next_change() -> None:
    run_python("""
        import sys, warnings
        sys.modules["numpy"] = None  # PyTorch, which imports it, goes without
        warnings.simplefilter("ignore")
        import torch
        from daf.memory.recycling_allocator import RecyclingAllocator
        from daf.memory.statistics import stats

        with RecyclingAllocator() as allocator:
            del sys.modules["numpy"]
            import numpy as np
            live = stats()["live_bytes.current"]
            unseen = np.ones(2**20)
            assert stats()["live_bytes.current"] == live
            allocator.cap_bytes = 2**20
            array = np.ones(2**20)
            assert stats()["live_bytes.current"] - live == 2**23
            unseen.resize(2**21, refcheck=False)
            assert stats()["live_bytes.current"] - live == 2**23 + 2**24
            assert unseen[:2**20].all() and not unseen[2**20:].any() and array.all()
            del array, unseen
            assert stats()["live_bytes.current"] == live
        print("ok")
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_arrays_without_a_limit() -> None:
    run_python("""
        import os, numpy as np, torch
        from daf.memory.recycling_allocator import RecyclingAllocator
        from daf.memory.statistics import stats
        MIB = 2**20
        with RecyclingAllocator() as allocator:
            kept = np.ones(8 * MIB, dtype=np.uint8)
            allocator.limit_bytes = stats()["held_bytes.current"] + 10 * MIB
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    held = stats()["held_bytes.current"]
                    own = np.zeros(100 * MIB, dtype=np.uint8)
                    assert not own.any() and stats()["held_bytes.current"] == held
                    kept.resize(50 * MIB, refcheck=False)
                    assert kept[:8 * MIB].all() and not kept[8 * MIB:].any()
                    del kept, own
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
            assert kept.all()
            try: np.ones(100 * MIB, dtype=np.uint8)
            except MemoryError: print("ok")
    """)


def model_and_batch(depth: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, *[16] * depth):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.Tanh()]
    return nn.Sequential(*layers), torch.randn(32, 3, 64, 64)


def budgeted(more_bytes: int, depth: int) -> tuple[Session, torch.Tensor, int]:
    gc.collect()
    model, batch = model_and_batch(depth)
    process_memory.warm_up()
    glibc.return_free_memory()  # what other tests freed is no room beside the budget's
    budget_bytes = process_memory.resident_bytes() + more_bytes
    process_memory.reset_peak()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Session(model, optimizer, budget_bytes), batch, budget_bytes


needs_peak = pytest.mark.skipif(
    not process_memory.peak_is_exact(), reason="this system keeps no resettable high-water mark"
)


@needs_peak
def test_a_burst_is_a_memory_error_and_the_next_step_trains() -> None:
    session, batch, budget_bytes = budgeted(250 * MIB, depth=1)

    def bursting(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        ones(400)
        return model(batch).square().mean()

    def quiet(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    with session:
        before = session.step(batch, quiet).loss
        with pytest.raises(MemoryError):
            ones(400)  # between steps
        with pytest.raises(MemoryError):
            session.step(batch, bursting)
        assert session.step(batch, quiet).loss < before
        assert process_memory.peak_bytes() <= budget_bytes


def test_a_step_whose_array_was_refused_runs_again_under_a_tighter_plan() -> None:
    """The array fits once the step holds less: what the first attempt had is given back."""
    session, batch, _ = budgeted(220 * MIB, depth=5)
    sizes_mib = iter((0.0, 400.0, 0.0))  # of a step, then of two attempts at the next one

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mean = model(batch).square().mean()
        ones(next(sizes_mib, 0.0) if session.plan is not None and not session.is_measuring else 0.0)
        return mean

    with session:
        session.prepare(batch, loss)
        before = [each.detach().clone() for each in session.model.parameters()]
        sizes_mib = iter((400.0, 0.0))
        report = session.step(batch, loss)
        assert next(sizes_mib, None) is None  # both attempts were made
        assert report.budget_bytes is not None
        assert not all(map(torch.equal, before, session.model.parameters()))


@needs_peak
def test_slow_growth_tightens_the_plan_and_never_passes_the_budget() -> None:
    """In a process of its own: what others have left idle there moves the plan's turn."""
    run_python(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from daf.torch_compat import compiler
        from tests.memory.test_arrays import grow_slowly
        compiler.keep_out()  # which the first optimizer would import, in seconds
        grow_slowly()
        print("ok")
    """)


def grow_slowly() -> None:
    before = stats()["live_blocks.large"]
    model, batch = model_and_batch(depth=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept: list[np.ndarray] = []
    plans: list[tuple[str, int]] = []  # a tighter one has another policy, or smaller parts
    with Session(model, optimizer, "8GB", sensitivity=False, split=False) as session:

        def step() -> None:
            session.step(batch, lambda model, batch: model(batch).square().mean())
            assert session.plan is not None
            plans.append((session.plan.policy.name, session.plan.micro_batch))

        def grow() -> None:
            while len(kept) < 20:
                kept.append(ones(40))
                step()

        step()  # brings in what the first step of a process loads
        gc.collect()
        session.budget = budget_bytes = process_memory.resident_bytes() + 220 * MIB
        process_memory.reset_peak()
        while len(set(plans)) == 1:
            step()
            kept.append(ones(20))
        assert plans[0][0] == "plain"
        assert len(kept) > 1
        with pytest.raises(MemoryError):  # no plan is tight enough any more
            grow()
        assert process_memory.peak_bytes() <= budget_bytes
    assert native.settings() == (None, None)
    assert all(filled(array, 1) for array in kept)
    assert stats()["live_blocks.large"] == before + len(kept)
    kept.clear()
    assert stats()["live_blocks.large"] == before


def test_once_it_is_left_nothing_is_redirected() -> None:
    run_python("""
        import ctypes, re, numpy as np, torch
        from pathlib import Path
        from daf._native import allocator as native
        from daf.memory.recycling_allocator import RecyclingAllocator

        def slots():
            "The writable pages of NumPy's library that hold its relocation slots."
            found = {}
            for line in Path("/proc/self/maps").read_text().splitlines():
                if "_multiarray_umath" not in line or " r-" in line and "r-xp" in line: continue
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                found[first] = ctypes.string_at(first, last - first)
            return found

        np.ones(2**20), np.zeros(2**20), np.resize(np.ones(2**20), 2**21)  # bound by now
        before = slots()
        with RecyclingAllocator():
            array = np.ones(2**20)
            inside = slots()
            del array
        after = slots()
        ours = {first for first in before if before[first] != inside[first]}
        assert ours

        def words(pages): return {
            first + 8 * index: pages[first][8 * index:8 * index + 8]
            for first in ours for index in range(len(pages[first]) // 8)
        }
        before, inside, after = words(before), words(inside), words(after)
        code = next(line for line in Path("/proc/self/maps").read_text().splitlines()
                    if "_native" in line and "r-xp" in line).split()[0]
        first, last = (int(part, 16) for part in code.split("-"))
        def redirected(pages): return {
            address for address, word in pages.items()
            if first <= int.from_bytes(word, "little") < last
        }
        assert not redirected(before) and not redirected(after)
        assert len(redirected(inside)) >= 4  # malloc, calloc, realloc, free
        assert all(after[address] == before[address] for address in redirected(inside))
        print("ok")
    """)
