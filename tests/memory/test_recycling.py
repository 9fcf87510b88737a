from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from daf._native import allocator as native
from torch import nn

from daf.core.errors import PlatformError
from daf.memory.recycling_allocator import RecyclingAllocator, limit_for_process, unsupported_reason
from daf.memory.statistics import audit, reset_peaks, stats

MIB = 2**20

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.usefixtures("account_left_empty"),
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]


def number(name: str) -> int:
    return stats()[name]


def block(mib: float) -> torch.Tensor:
    return torch.full((int(mib * MIB / 4),), 3.0)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )


def train(steps: int, each_step: object = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(16 * 24 * 24, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for _ in range(steps):
        if callable(each_step):
            each_step()
        optimizer.zero_grad()
        inputs, labels = torch.randn(32, 3, 24, 24), torch.randint(0, 10, (32,))
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_freed_block_is_the_next_one_and_no_byte_comes_from_the_system() -> None:
    with RecyclingAllocator():
        address = block(8).data_ptr()
        fresh = number("fresh_bytes")
        again = block(8)
        assert again.data_ptr() == address
        assert number("fresh_bytes") == fresh
        assert number("recycled_bytes.current") == 0
        del again
        assert number("recycled_bytes.current") == 8 * MIB


def test_live_bytes_are_exact_for_large_and_small_blocks() -> None:
    with RecyclingAllocator():
        before = number("live_bytes.current")
        large, small = torch.empty(MIB + 7), torch.empty(1001, dtype=torch.uint8)
        # PyTorch itself asks for what the tensor needs, no more.
        assert number("live_bytes.current") - before == 4 * (MIB + 7) + 1001
        del large, small
        assert number("live_bytes.current") == before


def test_best_fit_takes_at_most_a_quarter_too_much() -> None:
    with RecyclingAllocator():
        five, nine = block(5), block(9)
        addresses = five.data_ptr(), nine.data_ptr()
        del five, nine
        four = block(4)
        assert four.data_ptr() == addresses[0]
        fresh, held = number("fresh_bytes"), number("held_bytes.current")
        one = block(1.25)  # nine is far too large and stays whole; what is left of five grows
        assert one.data_ptr() == addresses[0] + 4 * MIB
        assert number("fresh_bytes") - fresh == int(0.25 * MIB)
        assert number("held_bytes.current") - held == int(0.25 * MIB)
        del four, one


def test_within_a_limit_every_short_size_has_blocks_of_its_own() -> None:
    with RecyclingAllocator() as allocator:
        allocator.limit_bytes = number("held_bytes.current") + 8 * MIB
        sizes = (0.25, 0.5, 1.0, 1.75)
        for size in sizes:
            block(size)
        assert number("recycled_bytes.current") == int(sum(sizes) * MIB)
        fresh = number("fresh_bytes")
        for _ in range(3):
            for size in sizes:
                assert float(block(size).sum()) == 3.0 * int(size * MIB / 4)
        assert number("fresh_bytes") == fresh


def test_at_the_limit_short_blocks_become_others_and_nothing_is_refused() -> None:
    with RecyclingAllocator() as allocator:
        allocator.limit_bytes = limit = number("held_bytes.current") + 2 * MIB + MIB // 16
        keep = block(0.5)
        kept = [0.25, 0.5]  # within the limit as blocks of their own
        for size, nearest in ((0.25, 0), (0.5, 0), (1.0, 0.5), (1.25, 1.0), (0.75, 1.25)):
            before = {name: number(name) for name in ("refusals", "fresh_bytes", "resized")}
            assert float(block(size).sum()) == 3.0 * int(size * MIB / 4)
            assert number("refusals") == before["refusals"]
            assert number("held_bytes.current") <= limit
            fresh = max(0, int((size - nearest) * MIB))
            assert number("fresh_bytes") - before["fresh_bytes"] == fresh
            assert number("resized") - before["resized"] == (size not in kept)
        assert number("recycled_bytes.current") == int((0.25 + 0.75) * MIB)
        assert float(keep.sum()) == 1.5 * MIB / 4


def test_the_last_slot_of_a_long_block_takes_a_short_one_s_pages() -> None:
    with RecyclingAllocator():
        short = block(1)
        address = short.data_ptr()
        del short
        fresh, moved = number("fresh_bytes"), number("moved_bytes")
        long = block(3.5)
        if number("moved_bytes") == moved:
            pytest.skip("this kernel cannot move pages")
        assert long.data_ptr() != address
        assert number("moved_bytes") - moved == MIB
        assert number("fresh_bytes") - fresh == int(2.5 * MIB)
        assert number("recycled_bytes.current") == 0
        del long


def test_pages_that_came_from_two_places_are_not_moved_together() -> None:
    """They lie in two mappings; before Linux 6.12 moving them would leave a hole at the target."""
    with RecyclingAllocator():
        block(0.5)
        moved = number("moved_bytes")
        block(3)  # its last slot: half a MiB that was moved there, half from the system
        if number("moved_bytes") == moved:
            pytest.skip("this kernel cannot move pages")
        four = block(4)  # takes its whole slot, and leaves the last one recycled
        assert number("recycled_bytes.current") == MIB
        moved, fresh = number("moved_bytes"), number("fresh_bytes")
        long = block(3.5)
        assert number("moved_bytes") - moved == MIB // 2
        assert number("fresh_bytes") - fresh == 3 * MIB
        assert float(long.sum()) == 3.5 * 3.0 * MIB / 4
        assert float(four.sum()) == 3.0 * MIB


def test_pages_of_several_recycled_blocks_make_one_larger_block() -> None:
    with RecyclingAllocator():
        parts = [block(4) for _ in range(4)]
        del parts
        held, fresh = number("held_bytes.current"), number("fresh_bytes")
        whole = block(16)
        assert number("held_bytes.current") == held
        if number("moved_bytes") == 0:
            pytest.skip("this kernel cannot move pages (MREMAP_DONTUNMAP)")
        assert number("fresh_bytes") == fresh
        found = audit()
        assert found.range_resident_bytes == found.large_bytes
        assert bool((whole == 3.0).all())
        del whole


def test_a_large_recycled_block_is_split() -> None:
    with RecyclingAllocator():
        address = block(16).data_ptr()
        fresh = number("fresh_bytes")
        first, second = block(6), block(10)
        assert {first.data_ptr(), second.data_ptr()} == {address, address + 6 * MIB}
        assert number("fresh_bytes") == fresh
        del first, second


@pytest.mark.parametrize("cap_mib", [0, 3, 8, 64])
def test_the_cap_holds_at_every_moment(cap_mib: int) -> None:
    with RecyclingAllocator(cap_bytes=cap_mib * MIB):
        for size in (2, 7, 16, 1.5, 5, 30):
            del (tensor := [block(size)])[0]
            assert number("recycled_bytes.current") <= cap_mib * MIB, tensor


def test_shrinking_the_cap_gives_memory_back_at_once() -> None:
    with RecyclingAllocator() as allocator:
        del (tensors := [block(16), block(8)])[:]
        assert tensors == []
        before = audit()
        allocator.cap_bytes = 4 * MIB
        after = audit()
        assert before.range_resident_bytes - after.range_resident_bytes == 20 * MIB
        allocator.cap_bytes = 0
        assert audit().range_resident_bytes == after.range_resident_bytes - 4 * MIB


def test_the_least_recently_used_go_first() -> None:
    with RecyclingAllocator() as allocator:
        old, young = block(4), block(6)
        address = young.data_ptr()
        del old
        del young
        allocator.cap_bytes = 6 * MIB
        kept = block(6)
        assert kept.data_ptr() == address
        del kept


def test_beyond_the_limit_pytorch_raises_and_training_goes_on() -> None:
    with RecyclingAllocator() as allocator:
        allocator.limit_bytes = number("held_bytes.current") + 48 * MIB
        kept = block(20)
        refusals = number("refusals")
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(30 * MIB // 4)
        assert number("refusals") == refusals + 1
        assert number("held_bytes.current") <= allocator.limit_bytes
        parameters = train(2)
        allocator.limit_bytes = None
        assert same(parameters, train(2))
        del kept


def test_an_allocation_empties_what_is_recycled_before_it_fails() -> None:
    with RecyclingAllocator() as allocator:
        del (tensors := [block(1.5) for _ in range(8)])[:]
        assert tensors == []
        allocator.limit_bytes = number("held_bytes.current") + MIB
        emptied = number("emptied_for_limit")
        large = block(12)  # 1.5 MiB blocks have no whole slot to move
        assert number("emptied_for_limit") > emptied
        assert number("held_bytes.current") <= allocator.limit_bytes
        del large


def test_no_limit_kills_a_step_or_is_passed() -> None:
    reference = train(1)
    outcomes = []
    with RecyclingAllocator() as allocator:
        for limit_mib in range(1, 40, 3):
            allocator.limit_bytes = number("live_bytes.current") + limit_mib * MIB
            reset_peaks()
            try:
                outcomes.append(same(train(1), reference))
            except RuntimeError:
                outcomes.append(None)
            gc.collect()
            assert number("held_bytes.peak") <= allocator.limit_bytes
            allocator.limit_bytes = None
            assert same(train(1), reference)
    assert set(outcomes) == {None, True}
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome is True)


def test_the_pool_is_asked_after_recycled_blocks_and_may_save_the_allocation() -> None:
    pool = [block(8), block(8)]
    asked: list[int] = []

    def reclaim(needed_bytes: int) -> int:
        asked.append(needed_bytes)
        native.discharge_external(8 * MIB)
        return 8 * MIB if pool.pop() is not None else 0

    with RecyclingAllocator(reclaim=reclaim) as allocator:
        assert native.charge_external(16 * MIB)
        allocator.limit_bytes = number("held_bytes.current") + 4 * MIB
        tensor = block(10)
        assert asked == [6 * MIB]
        assert len(pool) == 1
        native.discharge_external(8 * MIB)
        del tensor
    pool.clear()


def test_a_failing_reclaim_hook_fails_only_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.append(found.exc_value))

    def reclaim(needed_bytes: int) -> int:
        raise KeyError("pool is gone")

    with RecyclingAllocator(reclaim=reclaim) as allocator:
        allocator.limit_bytes = number("held_bytes.current") + 4 * MIB
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(8 * MIB // 4)
    assert [type(error) for error in reported] == [KeyError]


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """As in a terminal: where a shell began this in the background, Ctrl-C would be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_in_a_reclaim_hook_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.append(found.exc_value))

    def reclaim(needed_bytes: int) -> int:
        raise KeyboardInterrupt

    def ask_for_too_much() -> None:
        try:
            torch.empty(64 * MIB)  # more than what earlier tests freed could serve
        except RuntimeError:
            time.sleep(0)  # where Python looks for signals

    with RecyclingAllocator(reclaim=reclaim) as allocator:
        allocator.limit_bytes = number("held_bytes.current") + 4 * MIB
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                ask_for_too_much()
    assert reported == []


def test_external_bytes_are_refused_beyond_the_limit() -> None:
    with RecyclingAllocator() as allocator:
        allocator.limit_bytes = number("held_bytes.current") + 4 * MIB
        assert not native.charge_external(5 * MIB)
        assert native.charge_external(4 * MIB)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(MIB)
        native.discharge_external(4 * MIB)


@pytest.mark.thorough
def test_results_are_bit_equal_while_it_comes_and_goes_a_thousand_times() -> None:
    plain = train(20)
    rounds = iter(range(10**6))

    def come_and_go() -> None:
        for _ in range(50):
            if next(rounds) % 2:
                native.remove()
            else:
                assert native.install() == ""

    with RecyclingAllocator(cap_bytes=16 * MIB):
        native.remove()
        assert same(train(20, come_and_go), plain)
        assert native.install() == ""
    assert next(rounds) == 1000


def test_it_comes_and_goes_while_another_thread_trains() -> None:
    plain = train(30)
    found: list[list[torch.Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(train(30)))
    thread.start()
    while thread.is_alive():
        with RecyclingAllocator():
            pass
    thread.join()
    # Random numbers come from the one global generator, which only that thread used.
    assert same(found[0], plain)


def test_tensors_outlive_the_allocator_and_those_born_before_die_inside() -> None:
    others, held = number("live_blocks.large"), number("held_bytes.current")
    before = block(4)
    with RecyclingAllocator():
        del before
        survivor = block(4)
        view = survivor.numpy()
    assert not native.is_installed()
    assert float(survivor.sum()) == 3.0 * MIB
    del survivor
    assert float(view.sum()) == 3.0 * MIB
    assert number("live_blocks.large") == others + 1
    del view
    assert number("live_blocks.large") == others
    assert number("held_bytes.current") == held
    native.refresh()
    assert float(block(4).sum()) == 3.0 * MIB


def test_numpy_and_dlpack_share_memory_both_ways() -> None:
    with RecyclingAllocator():
        array = np.full(MIB, 2.0, dtype=np.float32)
        shared = torch.from_numpy(array)
        shared += 1
        assert array[-1] == 3.0
        del shared
        tensor = block(4)
        capsule = np.from_dlpack(tensor)
        resized = tensor.numpy().copy()
        resized.resize(2 * MIB, refcheck=False)
        del tensor
        assert float(capsule.sum()) == 3.0 * MIB
        grown = block(2)
        grown.resize_(2 * MIB)
        assert float(grown[: MIB // 2].sum()) == 3.0 * MIB / 2
        del array, capsule, resized, grown


def test_of_nested_ones_the_least_cap_and_limit_hold() -> None:
    with RecyclingAllocator(cap_bytes=10 * MIB, limit_bytes=10**12):
        with RecyclingAllocator(cap_bytes=0):
            assert native.settings() == (0, 10**12)
        assert native.settings() == (10 * MIB, 10**12)
        assert native.is_installed()
    assert native.settings() == (None, None)


def test_a_hit_costs_less_than_a_microsecond() -> None:
    with RecyclingAllocator():
        pair_ns = min(native.pair_ns(8 * MIB, 20_000) for _ in range(5))
    assert pair_ns < 1000


def test_the_account_is_what_the_kernel_says() -> None:
    with RecyclingAllocator(cap_bytes=32 * MIB):
        train(2)
        other = audit().other_bytes
        kept = [block(size) for size in (1.5, 3, 7.25, 40)]
        train(2)
        found = audit()
        assert found.range_resident_bytes == pytest.approx(found.large_bytes, rel=0.01)
        assert found.resident_bytes == pytest.approx(found.held_bytes + other, rel=0.01)
        del kept


def test_the_limit_for_a_process_leaves_room_for_everything_else() -> None:
    with RecyclingAllocator():
        tensor = block(8)
        limit = limit_for_process(10**10, spare_bytes=10**6)
        expected = 10**10 - audit().other_bytes - 10**6
        assert limit == pytest.approx(expected, abs=2 * MIB)
        assert limit_for_process(1) == 0
        del tensor


@pytest.mark.parametrize("count", [-1, -(2**40)])
def test_negative_bytes_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        RecyclingAllocator(cap_bytes=count)
    with RecyclingAllocator() as allocator, pytest.raises(ValueError, match="give 0 or more"):
        allocator.limit_bytes = count


def test_where_it_cannot_be_installed_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        @staticmethod
        def unsupported_reason() -> str:
            return "allocations are redirected on Linux only"

    monkeypatch.setattr("daf.memory.recycling_allocator.native", Elsewhere)
    assert unsupported_reason() is not None
    with pytest.raises(PlatformError, match="Linux only"), RecyclingAllocator():
        pass


def test_forked_data_loaders_work_and_the_parent_s_memory_stays_its_own() -> None:
    done = run_python("""
        import torch
        from torch.utils.data import DataLoader, Dataset
        from daf.memory.recycling_allocator import RecyclingAllocator
        from daf.memory.statistics import stats

        class Images(Dataset):
            def __init__(self): self.images = torch.arange(64.0).repeat_interleave(2**18)
            def __len__(self): return 64
            def __getitem__(self, index):
                scratch = torch.zeros(2**20)  # allocates and frees in the worker
                return self.images[index * 2**18:(index + 1) * 2**18] + scratch[:2**18]

        with RecyclingAllocator(limit_bytes=2**30):
            data = Images()
            torch.ones(2**22)  # leaves a recycled block behind
            seen = set()
            loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
            for _ in range(2):
                for batch in loader:
                    seen |= set(batch[:, 0].tolist())
                    kept = batch.clone().mul_(2)
            assert seen == set(map(float, range(64)))
            assert float(data.images.sum()) == sum(range(64)) * 2**18
        print("ok")
    """)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_interpreter_may_end_inside_with_tensors_and_a_hook() -> None:
    done = run_python("""
        import threading, torch
        from daf.memory.recycling_allocator import RecyclingAllocator
        allocator = RecyclingAllocator(limit_bytes=2**26, reclaim=lambda needed: 0).__enter__()
        kept = torch.ones(2**22)
        cycle = [torch.ones(2**20)]
        cycle.append(cycle)
        def churn():
            for _ in range(200):
                torch.ones(2**20)
        # Not a daemon: PyTorch itself does not survive those (its frames cannot be unwound).
        threading.Thread(target=churn).start()
        torch.nn.Linear(2**10, 2**10)(torch.ones(2**10, 2**10)).sum().backward()
        print("ok")
    """)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.thorough
def test_compiled_functions_allocate_and_free_under_it() -> None:
    done = run_python("""
        import shutil, sys, torch
        if shutil.which("g++") is None: print("no compiler"); sys.exit()
        from daf.memory.recycling_allocator import RecyclingAllocator
        from daf.memory.statistics import stats

        def step(x, weight):
            return torch.relu(x @ weight).mul(2).sum()

        inputs = torch.randn(1024, 1024)
        plain = torch.randn(1024, 1024, requires_grad=True)
        ours = plain.detach().clone().requires_grad_()
        try:
            compiled = torch.compile(step)
            compiled(inputs, plain).backward()
        except Exception as error:
            print("cannot compile here:", type(error).__name__); sys.exit()
        with RecyclingAllocator(cap_bytes=2**24):
            for _ in range(3):
                ours.grad = None
                compiled(inputs, ours).backward()
            assert stats()["hits"] > 0
        assert torch.equal(ours.grad, plain.grad)
        print("ok")
    """)
    assert done.returncode == 0, done.stderr
    if done.stdout != "ok\n":
        pytest.skip(done.stdout.strip())


def test_a_block_freed_twice_ends_the_process_with_a_message() -> None:
    done = run_python("""
        import ctypes, torch
        from daf.memory.recycling_allocator import RecyclingAllocator
        with RecyclingAllocator():
            tensor = torch.ones(2**20)
            library = ctypes.CDLL(torch.__path__[0] + "/lib/libc10.so")
            free = library._ZN3c108free_cpuEPv
            free.argtypes = [ctypes.c_void_p]
            free(tensor.data_ptr())
            free(tensor.data_ptr())
    """)
    assert done.returncode < 0
    assert "freed twice" in done.stderr


def test_above_a_lowered_limit_a_freed_block_goes_back_instead_of_being_kept() -> None:
    with RecyclingAllocator() as allocator:
        kept, freed = block(16), block(64)
        allocator.limit_bytes = number("held_bytes.current") - 24 * MIB
        assert number("held_bytes.current") == allocator.limit_bytes + 24 * MIB
        del freed
        assert number("held_bytes.current") == allocator.limit_bytes
        assert number("recycled_bytes.current") == 40 * MIB
        assert kept[-1].item() == 3.0


def test_what_an_exception_reads_to_unwind_goes_back_to_its_files() -> None:
    found = run_python("""
        import torch
        from daf._native import allocator as native

        def file_bytes():
            with open("/proc/self/status") as status:
                return next(1024 * int(line.split()[1]) for line in status if "RssFile" in line)

        def refuse():
            try:
                y = torch.ones(1, requires_grad=True).expand(2**24, 2**22)
                y.tanh()
            except RuntimeError:
                pass

        torch.ones(4, requires_grad=True).tanh().sum().backward()
        refuse()  # reads the code of exceptions too, which stays
        native.drop_unwinding_tables()
        before = file_bytes()
        refuse()
        read = file_bytes() - before
        native.drop_unwinding_tables()
        left = file_bytes() - before
        refuse()  # they are read again
        torch.ones(4, requires_grad=True).tanh().sum().backward()
        print(read, left, file_bytes() - before)
    """)
    assert found.returncode == 0, found.stderr
    read, left, again = map(int, found.stdout.split())
    assert read > MIB
    assert left < read / 20
    assert left < again <= read + MIB
