"""Pages under streams: on a model whose streams run late, no page is written while it is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf.errors import KernelError, PoolFullError
from daf.store.device_pages import DevicePages


class ModelEvent:
    def __init__(self, stream: ModelStream, position: int) -> None:
        self.stream, self.position = stream, position

    def query(self) -> bool:
        return self.stream.done >= self.position


class ModelStream:
    """Work is issued at once and done later, in order, when ``advance`` says so."""

    def __init__(self) -> None:
        self.work: list[tuple[str, int]] = []  # (owner, page)
        self.done = 0

    def use(self, owner: str, pages: list[int]) -> None:
        self.work += [(owner, page) for page in pages]

    def record_event(self) -> ModelEvent:
        return ModelEvent(self, len(self.work))

    def advance(self, steps: int) -> None:
        self.done = min(len(self.work), self.done + steps)

    def pages_in_flight(self) -> set[int]:
        return {page for _, page in self.work[self.done :]}


STEPS = st.lists(
    st.tuples(st.sampled_from("afr"), st.integers(0, 2), st.integers(1, 6)), max_size=80
)


@given(STEPS)
def test_no_page_goes_to_a_stream_while_another_still_uses_it(steps) -> None:
    pages, streams = DevicePages(16), [ModelStream() for _ in range(3)]
    living: list[tuple[list[int], ModelStream]] = []
    given_back: list[tuple[ModelEvent, list[int]]] = []
    for number, (kind, which, amount) in enumerate(steps):
        stream = streams[which]
        if kind == "r":
            stream.advance(amount)
        elif kind == "f" and living:
            freed, owner = living.pop(amount % len(living))
            given_back.append((owner.record_event(), freed))
            pages.free(freed, [owner])
        elif kind == "a":
            busy = set().union(*(o.pages_in_flight() for o in streams if o is not stream))
            held = {page for group, _ in living for page in group}
            try:
                found = pages.allocate(amount, stream)
            except PoolFullError:
                # Only an event tells that a stream has passed, even where its work is done.
                waiting = {
                    page
                    for event, freed in given_back
                    if event.stream is not stream and not event.query()
                    for page in freed
                }
                assert len(set(range(16)) - held - waiting) < amount
                continue
            assert len(set(found)) == amount
            assert not set(found) & (busy | held)
            stream.use(f"step {number}", found)
            living.append((found, stream))
        assert pages.used_pages == sum(len(group) for group, _ in living)


def test_the_lowest_addresses_are_used_first_and_a_stream_reuses_its_own_at_once() -> None:
    pages, one, other = DevicePages(4), ModelStream(), ModelStream()
    first = pages.allocate(3, one)
    assert first == [0, 1, 2]
    one.use("first", first)
    pages.free(first, [one])
    assert pages.allocate(1, other) == [3]
    with pytest.raises(PoolFullError, match="0 free and 0"):
        pages.allocate(1, other)
    assert pages.allocate(2, one) == [0, 1]
    one.advance(3)
    assert pages.allocate(1, other) == [2]


def test_pages_that_nobody_uses_are_free_at_once_and_misuse_is_refused() -> None:
    pages, stream = DevicePages(2), ModelStream()
    held = pages.allocate(2, stream)
    pages.free(held, [])
    with pytest.raises(KernelError, match="not in use"):
        pages.free(held, [])
    held = pages.allocate(2, stream)
    with pytest.raises(KernelError, match="2 streams"):
        pages.free(held, [stream, ModelStream()])
    with pytest.raises(KernelError, match="at least one"):
        DevicePages(0)
