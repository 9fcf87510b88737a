"""Allocations by module and operator over time, as ``torch.cuda.memory._record_memory_history``.

Covers PyTorch's tensors and oneDNN's scratch, in forward and backward. Recording costs tens of
microseconds per operator.
"""

from __future__ import annotations

import pickle
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from daf._native import allocator as native
from daf.memory.memory_events import Holder, MemoryEvent, holders_of, live_after, snapshot_of
from daf.memory.statistics import join_label, split_label
from daf.torch_compat.autograd_graph import running_node, sequence_number, sequence_number_of
from daf.torch_compat.operator_mode import DispatchMode

BEFORE = "(before recording)"
_PICKLE_PROTOCOL = 4  # that PyTorch's viewer reads


class History:
    """A recording of allocations and their askers while it is entered, as an allocator must be.

    ``model`` gives modules full paths instead of class names. Events beyond ``capacity`` are only
    counted in ``dropped``.
    """

    def __init__(self, model: nn.Module | None = None, *, capacity: int = 1_000_000) -> None:
        self.events: list[MemoryEvent] = []
        self.dropped = 0
        self._names = {} if model is None else {m: n for n, m in model.named_modules()}
        self._capacity = capacity
        self._resources = ExitStack()
        self._start_ns = 0
        self._start_us = 0
        self._before: list[MemoryEvent] = []

    def __enter__(self) -> History:
        self._before = [
            MemoryEvent(0.0, address, size, 0, BEFORE, "")
            for address, size, _, _, _ in native.live_blocks()
        ]
        native.record_events(self._capacity)
        self._start_ns = time.monotonic_ns()
        self._start_us = time.time_ns() // 1000
        self._resources.callback(self._stop)
        asker = _Asker(self._names)
        self._resources.enter_context(register_module_forward_pre_hook(asker.enter))
        leaving = register_module_forward_hook(asker.leave, always_call=True)
        self._resources.enter_context(leaving)
        self._resources.enter_context(_LabelOperators(asker))
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    @property
    def peak_bytes(self) -> int:
        """The most bytes live while recording."""
        return max((event.live_bytes for event in self.events), default=0)

    def at_peak(self) -> list[Holder]:
        """Return who held what when most was live, the largest first."""
        if not self.events:
            return []
        last = max(range(len(self.events)), key=lambda index: self.events[index].live_bytes)
        return holders_of(live_after(self._before, self.events[: last + 1]))

    def snapshot(self) -> dict[str, Any]:
        """Return the recording in the format of ``torch.cuda.memory._snapshot()``."""
        return snapshot_of(self._before, self.events, self._start_us)

    def write(self, path: Path) -> None:
        """Pickle ``snapshot()``, for pytorch.org/memory_viz or ``torch.cuda._memory_viz``."""
        path.write_bytes(pickle.dumps(self.snapshot(), protocol=_PICKLE_PROTOCOL))

    def _stop(self) -> None:
        recorded, self.dropped = native.recorded_events()
        self.events = list(self._resolve(recorded))

    def _resolve(self, recorded: list[tuple[int, int, int, int]]) -> Iterator[MemoryEvent]:
        live = {birth.address: birth for birth in self._before}
        total = sum(block.bytes for block in live.values())
        for time_ns, address, size, label in recorded:
            seconds = (time_ns - self._start_ns) / 1e9
            gone = live.pop(address, None)
            if gone:  # otherwise a small block from before
                total -= gone.bytes
                yield MemoryEvent(seconds, address, -gone.bytes, total, gone.module, gone.operator)
            if size > 0:
                total += size
                asker = split_label(native.label_text(label))
                live[address] = MemoryEvent(seconds, address, size, total, *asker)
                yield live[address]


class _Asker:
    """The module at work: by its forward call, or by the running node's sequence number."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []

    def enter(self, module: nn.Module, _inputs: object) -> None:
        self._stack.append(self._names.get(module, type(module).__name__))
        self._mark()

    def leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def module(self) -> str:
        node: Any = running_node()
        if node is None:
            return self._current()
        number = sequence_number_of(node)
        place = bisect_right(self._numbers, number) - 1
        path = self._paths[place] if place >= 0 else ""
        return f"{path} (backward)".lstrip()

    def _current(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _mark(self) -> None:
        self._numbers.append(sequence_number())
        self._paths.append(self._current())


class _LabelOperators(DispatchMode):
    """Labels this thread's allocations with the operator that is running."""

    def __init__(self, asker: _Asker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asker = asker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = native.intern_label(join_label(self._asker.module(), str(func)))
        native.set_label(label)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            native.set_label(0)
