"""What the pool should do, said simply: lists and dictionaries, no pages of memory."""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from dataclasses import dataclass, field


def order_key(importance: float) -> int:
    """Importance is compared to about one part in a million: by the upper half of its bits."""
    return int(struct.unpack("<Q", struct.pack("<d", importance))[0]) >> 32


def ceil_divide(value: int, unit: int) -> int:
    return -(-value // unit)


@dataclass
class ModelTensor:
    count: int
    bits: int
    minimum: int
    headers: bool
    importance: list[float]
    page_bytes: int
    pins: int = 1
    kept_by_run: list[int] = field(default_factory=list)
    key: tuple[int, int] | None = None
    is_new: bool = False  # not there yet: comes behind all that are as important

    def __post_init__(self) -> None:
        blocks = ceil_divide(self.count, 256)
        self.plane_bytes = 32 * blocks
        self.header_bytes = 4 * blocks if self.headers else 0
        self.header_pages = ceil_divide(self.header_bytes, self.page_bytes)
        self.kept_by_run = [self.bits] * ceil_divide(self.plane_bytes, self.page_bytes)
        self.kept_pages = self.bits * len(self.kept_by_run)
        self.payload = self.bits * self.plane_bytes + self.header_bytes

    @property
    def pages(self) -> int:
        return self.kept_pages + self.header_pages

    @property
    def spare(self) -> int:
        return self.kept_pages - self.minimum * len(self.kept_by_run)

    def run_bytes(self, run: int) -> int:
        return min(self.page_bytes, self.plane_bytes - run * self.page_bytes)

    def drop_page(self) -> int:
        """The last run that still has the least significant plane loses it; returns its payload."""
        most = max(self.kept_by_run)
        run = len(self.kept_by_run) - 1 - self.kept_by_run[::-1].index(most)
        self.kept_by_run[run] -= 1
        self.kept_pages -= 1
        self.payload -= self.run_bytes(run)
        return self.run_bytes(run)


class PoolModel:
    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.tensors: dict[int, ModelTensor] = {}
        self.order: list[tuple[int, int, int]] = []
        self.entered = 0
        self.evicted_pages = 0
        self.evicted_payload = 0
        self.live_pages = 0
        self.payload = 0
        self.spare = 0

    def enter(self, handle: int) -> None:
        tensor = self.tensors[handle]
        if tensor.pins or not tensor.spare:
            return
        self.entered += 1
        least = tensor.importance[max(tensor.kept_by_run) - 1]
        tensor.key = (order_key(least), self.entered + tensor.is_new * 2**62)
        insort(self.order, (*tensor.key, handle))
        self.spare += tensor.spare

    def leave(self, handle: int) -> None:
        tensor = self.tensors[handle]
        if tensor.key is None:
            return
        del self.order[bisect_left(self.order, (*tensor.key, handle))]
        tensor.key = None
        self.spare -= tensor.spare

    def add(self, handle: int, tensor: ModelTensor) -> None:
        self.tensors[handle] = tensor
        self.live_pages += tensor.pages
        self.payload += tensor.payload
        self.enter(handle)

    def remove(self, handle: int) -> None:
        self.leave(handle)
        tensor = self.tensors.pop(handle)
        self.live_pages -= tensor.pages
        self.payload -= tensor.payload

    def pin(self, handle: int) -> None:
        self.leave(handle)
        self.tensors[handle].pins += 1

    def unpin(self, handle: int) -> None:
        self.tensors[handle].pins -= 1
        self.enter(handle)

    def evict(self, pages: int) -> set[int]:
        """The least important pages go, one at a time; returns whose."""
        touched = set()
        for _ in range(pages):
            _, _, handle = self.order[0]
            tensor = self.tensors[handle]
            plane_before = max(tensor.kept_by_run)
            payload = tensor.drop_page()
            touched.add(handle)
            self.live_pages -= 1
            self.payload -= payload
            self.evicted_payload += payload
            self.evicted_pages += 1
            self.spare -= 1
            if max(tensor.kept_by_run) < plane_before:
                self.order.pop(0)
                tensor.key = None
                self.spare -= tensor.spare
                self.enter(handle)
        return touched
