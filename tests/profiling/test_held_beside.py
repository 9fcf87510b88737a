"""What a process holds beside tensors, as libraries load code and a cgroup's limit takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from daf.profiling import growth
from daf.profiling.growth import HeldBeside


@dataclass
class Memory:
    """What the system says of a process."""

    held: int = 100
    account: int = 30
    mapped: int = 50

    def held_bytes(self) -> int:
        return self.held

    def account_bytes(self) -> int:
        return self.account

    def mapped_bytes(self) -> int:
        return self.mapped


@dataclass
class Keeper:
    recycles: bool = True


def beside_of(memory: Memory, *, recycles: bool = True) -> HeldBeside:
    parts: Any = memory, Keeper(recycles)
    return HeldBeside(*parts)


def test_what_was_held_once_beside_tensors_counts_though_the_system_took_it() -> None:
    memory = Memory()
    beside = beside_of(memory)
    beside.note()
    memory.held, memory.account = 55, 10  # 45 beside tensors, where there were 70
    assert beside.resident_bytes() == 70 + 10
    memory.held = 90
    assert beside.resident_bytes() == 90


def test_code_that_was_unmapped_and_mapped_again_counts_once() -> None:
    memory = Memory()
    beside = beside_of(memory)
    beside.note()
    memory.held, memory.mapped = 80, 30  # the limit took 20 of code: 50 beside tensors, not 70
    beside.note()
    assert beside.resident_bytes() == 70 + 30
    memory.held, memory.mapped = 105, 55  # it is back, and 5 more
    beside.note()
    assert beside.resident_bytes() == 75 + 30


def test_pages_are_counted_that_were_read_again_after_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read again while a program was loading tells nothing of its steps."""
    read = iter((5000, 5000, 5300))
    monkeypatch.setattr(growth, "reread_pages", lambda: next(read))
    beside = beside_of(Memory())
    assert beside.reread_pages == 0
    beside.note()
    beside.note()
    assert beside.reread_pages == 0
    assert beside.reread_pages == 300


def test_without_a_limit_it_is_what_the_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "reread_pages", lambda: pytest.fail("slow, and of no use"))
    memory = Memory()
    beside = beside_of(memory, recycles=False)
    beside.note()
    memory.held = 40
    assert (beside.resident_bytes(), beside.reread_pages) == (40, 0)
