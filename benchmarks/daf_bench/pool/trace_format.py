"""Traces of what a store was really asked for: recorded while training, played back elsewhere.

A trace is a file of JSON lines, one operation each, in the order they came::

    {"op":"planes","id":7,"count":65536,"bits":4,"minimum":1,"importance":[...],"headers":true,"tag":0}
    {"op":"seal","id":7}                   written; planes may go from here on
    {"op":"free","id":7}
    {"op":"evict","bytes":4096}  {"op":"cap","bytes":1000000}  {"op":"trim"}
    {"op":"mark","label":"step 3"}         the caller's own note

What the pool gives up by itself follows from these, so it is not written; a
player sees the same on an equal pool. Record from one training process: with
several threads the order of lines is only nearly that of the operations.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from daf.core.errors import DataError
from daf.pool.paged_pool import PagedStore, PlaneTensor, plane_importance
from daf.pool.store import PlaneOptions, Planes, Store
from daf.pool.views import EvictedPlane, PlaneView

Event = dict[str, Any]
Writes = Callable[[Event], None]


class TraceWriter:
    """Writes operations to a file; ``record`` gives it those of a :class:`PagedStore`."""

    def __init__(self, path: Path | str) -> None:
        """Begin a new file.

        Raises:
            OSError: it cannot be written.
        """
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write one operation; after ``close`` nothing more is written."""
        line = json.dumps(event, separators=(",", ":")) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)

    def mark(self, label: str) -> None:
        """Write a note of the caller's own, such as where a step begins."""
        self({"op": "mark", "label": label})

    def close(self) -> None:
        """Finish the file."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def record(store: PagedStore, writer: Writes) -> None:
    """Write down every operation of a pool from now on."""
    store.native = RecordedPool(store.native, writer)


class RecordedPool:
    """The native pool, with what it is asked for written down."""

    def __init__(self, native: Any, writer: Writes) -> None:
        self._native = native
        self._writer = writer
        self._pins: Counter[int] = Counter()  # of tensors that are not sealed yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def allocate(
        self,
        count: int,
        bits: int,
        minimum: int,
        headers: bool,
        values: list[float],
        tag: int,
        page_bytes: int = 0,
    ) -> int:
        """Allocate planes, pinned once."""
        handle: int = self._native.allocate(count, bits, minimum, headers, values, tag, page_bytes)
        self._pins[handle] = 1
        event = {"op": "planes", "id": handle}
        self._writer(event | planes_event(count, bits, minimum, values, headers, tag))
        return handle

    def pin(self, handle: int) -> Any:
        """Pin planes."""
        found = self._native.pin(handle)
        if handle in self._pins:
            self._pins[handle] += 1
        return found

    def unpin(self, handle: int) -> None:
        """Unpin planes; the last time they are sealed."""
        self._native.unpin(handle)
        if handle in self._pins:
            self._pins[handle] -= 1
            if not self._pins[handle]:
                del self._pins[handle]
                self._writer({"op": "seal", "id": handle})

    def release(self, handle: int, even_pinned: bool = False) -> None:
        """Free a tensor."""
        self._native.release(handle, even_pinned)
        self._writer({"op": "free", "id": handle})

    def set_cap(self, cap_bytes: int | None) -> Any:
        """Set the cap."""
        found = self._native.set_cap(cap_bytes)
        self._writer({"op": "cap", "bytes": cap_bytes})
        return found

    def evict(self, nbytes: int) -> Any:
        """Evict planes."""
        found = self._native.evict(nbytes)
        self._writer({"op": "evict", "bytes": nbytes})
        return found

    def trim(self) -> int:
        """Return free pages to the system."""
        self._writer({"op": "trim"})
        return int(self._native.trim())


def planes_event(
    count: int,
    bits: int,
    minimum_bits: int | None,
    importance: Sequence[float] | None,
    headers: bool,
    tag: int,
) -> Event:
    """A request for planes as an operation, with its defaults filled in."""
    if importance is None:
        importance = plane_importance(count, bits) if bits <= 4 else [0.0] * bits
    return {
        "op": "planes",
        "count": count,
        "bits": bits,
        "minimum": bits if minimum_bits is None else minimum_bits,
        "importance": [float(value) for value in importance],
        "headers": headers,
        "tag": tag,
    }


class RecordedStore:
    """Any store, with the lives of its planes written down."""

    def __init__(self, store: Store, writer: TraceWriter) -> None:
        self._store = store
        self._writer = writer
        self._next_id = 1

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        return self._store.live_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes of planes given up since the store began."""
        return self._store.evicted_bytes

    def allocate_planes(self, count: int, bits: int, **options: Unpack[PlaneOptions]) -> Planes:
        """Planes of the store behind."""
        planes = self._store.allocate_planes(count, bits, **options)
        terms = {"minimum_bits": None, "importance": None, "headers": True, "tag": 0} | options
        terms.pop("weight", None)  # planes go by their importances
        event = planes_event(count, bits, **terms)
        return _RecordedPlanes(planes, self._begin(event))

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Those of the store behind."""
        return self._store.take_evictions()

    def give_back(self, nbytes: int) -> int:
        """Ask the store behind."""
        return self._store.give_back(nbytes)

    def _begin(self, event: Event) -> _Life:
        identity, self._next_id = self._next_id, self._next_id + 1
        return _Life(self._writer, identity, event)


class _Life:
    """Writes what begins and what follows under one number."""

    def __init__(self, writer: TraceWriter, identity: int, event: Event) -> None:
        self._writer = writer
        self._identity = identity
        writer({"op": event["op"], "id": identity} | event)

    def note(self, operation: str) -> None:
        self._writer({"op": operation, "id": self._identity})


class _RecordedPlanes:
    def __init__(self, planes: Planes, life: _Life) -> None:
        self._planes: Planes | None = planes
        self._life = life

    @property
    def nbytes(self) -> int:
        return self._alive.nbytes

    @property
    def view(self) -> PlaneView:
        return self._alive.view

    def filling(self) -> AbstractContextManager[PlaneView]:
        return self._alive.filling()

    def seal(self) -> None:
        self._alive.seal()
        self._life.note("seal")

    def pinned(self) -> AbstractContextManager[PlaneView]:
        return self._alive.pinned()

    @property
    def _alive(self) -> Planes:
        assert self._planes is not None
        return self._planes

    def __del__(self) -> None:
        self._planes = None  # first, so that the line follows the deed
        self._life.note("free")


def read_trace(path: Path | str) -> Iterator[Event]:
    """The operations of a trace, one by one.

    Raises:
        DataError: a line is no operation.
        OSError: the file cannot be read.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield _read_line(line, f"{path}, line {number}")


def _read_line(line: str, place: str) -> Event:
    try:
        event = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: no JSON ({error}); record the trace again") from error
    if not isinstance(event, dict) or not isinstance(event.get("op"), str):
        raise DataError(f'{place}: found {line[:60]!r}, which is no {{"op": ...}}')
    return event


class Player:
    """Does to a pool what a trace says; the tensors live as long as the trace lets them."""

    def __init__(self, store: PagedStore) -> None:
        self._store = store
        self._planes: dict[int, PlaneTensor] = {}

    def play(self, events: Iterable[Event]) -> Iterator[Event]:
        """Do one operation after the other; yields each when it is done.

        Raises:
            DataError: an operation is unknown, or speaks of a tensor that is not alive.
            PoolFullError: this pool is smaller than the one recorded.
        """
        for event in events:
            try:
                self._do(event)
            except KeyError as error:
                raise DataError(f"found {event}: {error} is missing, or is not alive") from error
            yield event

    def _do(self, event: Event) -> None:
        match event["op"]:
            case "planes":
                self._planes[event["id"]] = self._store.allocate_planes(
                    event["count"],
                    event["bits"],
                    minimum_bits=event["minimum"],
                    importance=event["importance"],
                    headers=event["headers"],
                    tag=event["tag"],
                )
            case "seal":
                self._planes[event["id"]].seal()
            case "free":
                self._planes.pop(event["id"]).release()
            case "evict":
                self._store.evict(event["bytes"])
            case "cap":
                self._store.set_cap(event["bytes"])
            case "trim":
                self._store.trim()
            case "mark":
                pass
            case unknown:
                raise DataError(f"found the operation {unknown!r}, which no trace has")
