"""Gives each case a process of its own, forked from a warm one, with a limit of time.

A case that a signal kills is a crash, and one that does not end is stopped; neither stops the run.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Row = dict[str, Any]
_WORDS = 1500


@dataclass(frozen=True, slots=True)
class _Running:
    process: ForkProcess
    answer: Connection
    until_s: float


def run_apart(
    work: Callable[[Item], Row], items: Sequence[Item], workers: int, limit_s: float
) -> Iterator[tuple[Item, Row]]:
    """Yield each item with what ``work`` returned for it, as they end.

    A process that dies, raises or takes longer than ``limit_s`` seconds yields a row whose
    ``outcome`` is "crashed", "failed" or "hung".
    """
    waiting, running = list(reversed(items)), dict[Item, _Running]()
    while waiting or running:
        while waiting and len(running) < workers:
            item = waiting.pop()
            running[item] = _start(work, item, limit_s)
        answers = [each.answer for each in running.values()]
        soonest = min(each.until_s for each in running.values())
        wait(answers, timeout=max(0.0, soonest - time.monotonic()))
        for item, each in list(running.items()):
            row = _ended(each)
            if row is not None:
                del running[item]
                yield item, row


def _start(work: Callable[[Item], Row], item: Item, limit_s: float) -> _Running:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, item, send))
    process.start()
    send.close()
    return _Running(process, receive, time.monotonic() + limit_s)


def _child(work: Callable[[Item], Row], item: Item, answer: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        row = work(item)
    except BaseException:
        row = {"outcome": "failed", "words": traceback.format_exc()[-_WORDS:]}
    answer.send(row)
    answer.close()


def _ended(running: _Running) -> Row | None:
    """Return the row of a process that has ended or must; None while it may go on."""
    if running.answer.poll():
        try:
            row: Row = running.answer.recv()
        except EOFError:
            row = {"outcome": "crashed"}
        running.process.join(timeout=10)
        if running.process.is_alive():
            running.process.kill()
            running.process.join()
        if row["outcome"] == "crashed":
            row |= {"words": _manner(running.process.exitcode)}
        running.process.close()
        return row
    if time.monotonic() < running.until_s:
        return None
    running.process.kill()
    running.process.join()
    running.process.close()
    return {"outcome": "hung", "words": "stopped at its limit of time"}


def _manner(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"ended with {exit_code}"
