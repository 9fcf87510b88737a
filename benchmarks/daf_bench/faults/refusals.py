"""Every allocation of every operator family refused in turn: an exception, and it works again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from daf._native import allocator as native

from daf.memory import RecyclingAllocator
from daf_bench.faults.children import Ended, Outcome, count_outcome, in_child
from daf_bench.faults.family import Family, Step, digest, seeded
from daf_bench.faults.operator_families import operator_families
from daf_bench.faults.training_families import training_families

_MANY = 1 << 40  # more requests than any step makes
# Some for the quick part, of every kind.
QUICK_FAMILIES = ("conv2d", "linear", "lstm", "gru", "fft", "cross entropy", "optimizer adam")
_QUICK_SHARE = 8  # of the allocations, every so many

Report = Callable[[str, int, int], None]


def all_families() -> dict[str, Family]:
    """Return every family by name."""
    return operator_families() | training_families()


def run_refusals(
    seed: int,
    families: Iterable[str] | None = None,
    quick: bool = False,
    on_progress: Report = lambda *_: None,
) -> dict[str, int]:
    """Refuse each allocation of each family in a child of its own, with one thread and with two.

    Args:
        seed: of weights and data.
        families: their names; None: all of them (with ``quick`` some of them).
        quick: refuse every eighth allocation only.
        on_progress: called with a family's name, and how many are done of how many.

    Returns:
        ``refusal_families``, ``refusals_tried``, ``crashes`` (ended by a signal), ``hangs`` (over
        a minute), ``wrong`` (other bits than plain's, or the step after a refusal fails).
    """
    torch.set_num_threads(1)  # before anything forks: a child has no threads but its own
    known = all_families()
    names = list(families or (QUICK_FAMILIES if quick else known))
    total = dict.fromkeys(("refusal_families", "refusals_tried", "crashes", "hangs", "wrong"), 0)
    for place, name in enumerate(names):
        on_progress(name, place, len(names))
        for each, count in refuse_family(known[name], seed, quick=quick).items():
            total[each] += count
    return total


def refuse_family(family: Family, seed: int, *, quick: bool = False) -> dict[str, int]:
    """Refuse each allocation of one family; figures as ``run_refusals`` returns them."""
    found = {"refusal_families": 1, "refusals_tried": 0, "crashes": 0, "hangs": 0, "wrong": 0}
    for threads in (1, 2):
        expected, requests = (
            answered(in_child(partial(in_threads, threads, partial(ask, family, seed))), family)
            for ask in (plain_digest, _requests)
        )
        every = _QUICK_SHARE if quick else 1
        for refused in range(seed % every, requests, every):
            work = partial(_refuse, family, seed, expected, refused)
            ended = in_child(partial(in_threads, threads, work))
            count_outcome(found, ended, "refusals_tried", 1)
    return found


def answered(ended: Ended, family: Family) -> Any:
    """Return what a child without faults said."""
    if ended.value is None:
        raise RuntimeError(
            f"{family.name} does not run plainly: signal {ended.signal} {ended.words}"
        )
    return ended.value


def in_threads(threads: int, work: Callable[[], Any]) -> Any:
    """Run in this thread with one thread of PyTorch's, or in another with several."""
    if threads == 1:
        torch.set_num_threads(1)
        return work()
    found: list[Any] = []

    def run() -> None:
        torch.set_num_threads(threads)
        found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def plain_digest(family: Family, seed: int) -> str:
    """Return the digest of a step without DAF's allocator."""
    return digest(seeded(seed, family)())


def _requests(family: Family, seed: int) -> int:
    """Return how many requests that can be refused a process's first step makes."""
    step = seeded(seed, family)
    with RecyclingAllocator():
        native.refuse_after(_MANY)
        step()
        return int(_MANY - native.refuse_after(-1))


def _refuse(family: Family, seed: int, expected: str, refused: int) -> Outcome:
    """Refuse that request in the process's first step, and in a later one."""
    step = seeded(seed, family)
    with RecyclingAllocator():
        return Outcome(2, sum(_is_wrong(step, expected, refused) for _ in range(2)))


def _is_wrong(step: Step, expected: str, refused: int) -> bool:
    """True if a step without those bytes, or the one after it, computes something else."""
    native.refuse_after(refused)
    try:
        results = step()
        native.refuse_after(-1)
        is_wrong = digest(results) != expected
    except Exception:  # any will do; that it is one is what is asked
        is_wrong = False
    native.refuse_after(-1)
    return digest(step()) != expected or is_wrong
