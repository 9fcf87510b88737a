"""Under a budget an allocation beyond it is refused, and everything set is undone."""

from __future__ import annotations

import gc
import mmap
from functools import partial

import pytest
import torch

from daf.memory import process_memory
from daf.memory.process_limit import MemoryKeeper
from daf.memory.recycling_allocator import unsupported_reason
from daf.memory.statistics import stats

MIB = 2**20
REASON = unsupported_reason()
pytestmark = [pytest.mark.smoke, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture
def keeper() -> MemoryKeeper:
    gc.collect()  # what earlier tests left must not become room in the middle of this one
    made = MemoryKeeper()
    made.open()
    made.flush()
    yield made
    made.close()


def hold(count_mib: int) -> torch.Tensor:
    return torch.ones(count_mib * MIB, dtype=torch.uint8)


def whole(block: torch.Tensor) -> bool:
    """Is every byte what was written? (Looked at without allocating.)"""
    return set(memoryview(block.numpy()[:: 1 << 12])) == {1} and block[-1].item() == 1


def test_beyond_the_budget_an_allocation_is_refused_and_counted(keeper: MemoryKeeper) -> None:
    budget = process_memory.resident_bytes() + 100 * MIB
    keeper.bound(budget, budget)
    assert whole(hold(64))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        hold(128)
    assert keeper.refusals() >= 1
    assert 28 * MIB <= keeper.missing_bytes <= 128 * MIB
    assert whole(hold(64))


def test_what_is_spared_beside_the_usual_is_refused_until_the_next_bound(
    keeper: MemoryKeeper,
) -> None:
    budget = process_memory.resident_bytes() + 110 * MIB
    keeper.spare_more_bytes = 60 * MIB
    keeper.bound(budget, budget)
    assert whole(hold(32))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        hold(64)
    keeper.rebound(budget + 8 * MIB)  # it moves in mid-step: as much is spared
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        hold(64)
    keeper.spare_more_bytes = 0
    keeper.bound(budget, budget)
    assert whole(hold(64))


def test_beyond_what_was_expected_freed_blocks_go_first_and_nothing_is_refused(
    keeper: MemoryKeeper,
) -> None:
    resident = process_memory.resident_bytes()
    keeper.bound(resident + 100 * MIB, resident + 400 * MIB)
    refusals = keeper.refusals()
    for size in (40, 60, 30, 70, 50):
        hold(size)
        assert process_memory.resident_bytes() < resident + 100 * MIB
    assert whole(hold(200))
    assert keeper.refusals() == refusals


def grow_beside(count_mib: int) -> mmap.mmap:
    """Memory of the process that its allocator knows nothing of."""
    grown = mmap.mmap(-1, count_mib * MIB)
    grown.write(b"1" * (count_mib * MIB))
    return grown


def test_growth_beside_the_account_is_taken_off_the_limit(keeper: MemoryKeeper) -> None:
    budget = process_memory.resident_bytes() + 100 * MIB
    keeper.bound(budget, budget)
    with grow_beside(40):
        assert not keeper.follow_growth()  # far from the limit as yet
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            hold(64)
        held = hold(50)
        assert whole(held)
        assert keeper.follow_growth()  # near it now
        assert process_memory.resident_bytes() <= budget


def test_growth_within_what_was_spared_changes_nothing(keeper: MemoryKeeper) -> None:
    budget = process_memory.resident_bytes() + 100 * MIB
    keeper.bound(budget, budget)
    limit = stats()["limit_bytes"]
    with grow_beside(1):
        keeper.follow_growth()
    assert stats()["limit_bytes"] == limit


def test_recycled_blocks_make_way_for_growth_beside_the_account(keeper: MemoryKeeper) -> None:
    budget = process_memory.resident_bytes() + 100 * MIB
    keeper.bound(budget, budget)
    hold(80)  # recycled
    with grow_beside(15):
        keeper.follow_growth()
        assert process_memory.resident_bytes() <= budget


def test_less_is_kept_for_reuse_when_less_is_expected(keeper: MemoryKeeper) -> None:
    resident = process_memory.resident_bytes()
    keeper.bound(resident + 400 * MIB, resident + 400 * MIB)
    hold(200)
    assert process_memory.resident_bytes() > resident + 190 * MIB
    keeper.expect(resident + 100 * MIB)
    assert process_memory.resident_bytes() < resident + 100 * MIB
    assert whole(hold(200))  # the bound is where it was


def test_what_must_not_fail_half_way_is_not_bounded(keeper: MemoryKeeper) -> None:
    budget = process_memory.resident_bytes() + 50 * MIB
    keeper.bound(budget, budget)
    with keeper.unbounded():
        held = hold(100)
    assert whole(held)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        hold(100)


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_that_must_finish_gives_back_first_and_then_passes_the_budget(ends: bool) -> None:
    """Until the next step is bounded, or its own turn ``ends``."""
    spare = [hold(60)]
    asked: list[int] = []

    def give_back(missing_bytes: int) -> int:
        asked.append(missing_bytes)
        return spare.pop().nbytes if spare else 0

    gc.collect()
    keeper = MemoryKeeper(give_back)
    keeper.open()
    try:
        keeper.flush()
        spare.append(hold(60))
        budget = process_memory.resident_bytes() + 50 * MIB
        keeper.bound(budget, budget)
        refusals = keeper.refusals()
        asked.clear()
        keeper.must_finish()
        first = hold(90)
        assert not spare
        assert keeper.overrun_bytes == 0
        second = hold(40)
        assert 10 * MIB <= keeper.overrun_bytes <= 40 * MIB
        assert whole(first)
        assert whole(second)
        assert keeper.refusals() == refusals
        (keeper.restore_bound if ends else partial(keeper.bound, budget, budget))()
        assert keeper.overrun_bytes == 0
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            hold(40)
    finally:
        keeper.close()


def test_flush_gives_recycled_blocks_back(keeper: MemoryKeeper) -> None:
    hold(100)
    before = process_memory.resident_bytes()
    keeper.flush()
    assert before - process_memory.resident_bytes() > 90 * MIB


def test_closing_undoes_everything_and_survivors_stay_valid() -> None:
    keeper = MemoryKeeper()
    keeper.open()
    stated = list(keeper.settings)
    survivor = hold(16)
    budget = process_memory.resident_bytes() + 20 * MIB
    keeper.bound(budget, budget)
    keeper.close()
    assert any("recycled" in line for line in stated)
    assert keeper.settings == []
    assert not keeper.recycles
    assert whole(hold(100))
    assert whole(survivor)


def test_whatever_error_the_user_s_code_makes_of_a_refusal_it_is_one(keeper: MemoryKeeper) -> None:
    keeper.bound(
        process_memory.resident_bytes() + 16 * MIB, process_memory.resident_bytes() + 16 * MIB
    )
    refusals, error = keeper.refusals(), ValueError("no batch")
    assert not keeper.has_refused(error, refusals)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        hold(64)
    assert keeper.has_refused(error, refusals)
