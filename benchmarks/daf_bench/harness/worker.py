"""One contestant of a side-by-side: its own process, stepped from outside.

The parent starts every contestant, then asks them in turn for a step, so that
noise of the machine falls on all alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from daf_bench.harness.subprocess_channel import RETURNING_FREED_BLOCKS, Child, ContestantError


@dataclass(frozen=True, slots=True)
class Entry:
    """What a contestant runs. ``bits`` None is plain PyTorch without any of DAF in its loop."""

    label: str
    model: str
    data: str
    batch_size: int
    seed: int = 0
    bits: int | str | None = None
    memory_format: str = "channels_last"
    learning_rate: float = 0.05
    return_freed_blocks: bool = False
    # DAF's own allocator, with this cap on what it recycles (None: no cap).
    recycle: bool = False
    recycle_cap_bytes: int | None = None
    # With it: nothing is recycled in the first two steps, and from then on no more is held than
    # their live bytes at their highest, and ``workload.LIMIT_ROOM_BYTES``.
    recycle_tightly: bool = False
    # Another allocator's shared library, put before the C library's.
    preload: str | None = None
    # Which of ``levered.LEVERS`` a loop without planner uses; None: with bits, a session.
    levers: tuple[str, ...] | None = None
    image_size: int | None = None  # pixels per side; None: the data's own
    context: int | None = None  # bytes per window of text; None: the data's own
    optimizer: str = "sgd"
    device: str = "cpu"  # PyTorch's name of where it is trained
    # The number type of ``torch.autocast`` around forward passes; None: none of it.
    autocast: str | None = None
    # The most that may be held where it is trained; what is asked beyond it is refused.
    limit_bytes: int | None = None
    # As DAF's own commands do; otherwise the first optimizer imports torch's compiler.
    keep_compiler_out: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a contestant; ``peak_bytes`` is the high-water mark of its memory in the step."""

    loss: float
    step_ms: float
    peak_bytes: int = 0


class Contestant:
    """The parent's handle on one contestant process."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.steps: list[Step] = []
        self._child = Child(
            "daf_bench.harness.worker_process",
            asdict(entry),
            entry.label,
            environment=_environment(entry),
        )
        try:
            self._child.ask("ready")
        except ContestantError:
            self.close()
            raise

    def step(self) -> Step:
        """Run one training step."""
        answer = self._child.ask("step")
        self.steps.append(Step(**answer))
        return self.steps[-1]

    def facts(self) -> dict[str, Any]:
        """floor_bytes, peak_bytes, saved_bytes_plain, saved_bytes_peak so far, and the account."""
        return self._child.ask("facts")

    def fits(self) -> bool:
        """Were two steps done, without being refused memory? It is of no more use if not."""
        return bool(self._child.ask("fits")["fits"])

    def close(self) -> None:
        """End the process."""
        self._child.end()


def _environment(entry: Entry) -> Mapping[str, str]:
    environment = dict(os.environ)
    if entry.return_freed_blocks:
        environment.update(RETURNING_FREED_BLOCKS)
    if entry.preload is not None:
        environment["LD_PRELOAD"] = entry.preload
    return environment


@contextmanager
def contestants(entries: list[Entry]) -> Iterator[list[Contestant]]:
    """Start these contestants; end them all on exit, also after an error."""
    with ExitStack() as stack:
        started = []
        for entry in entries:
            started.append(Contestant(entry))
            stack.callback(started[-1].close)
        yield started
