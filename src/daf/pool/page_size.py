"""The choice of a page size: padding wasted against the number of pages."""

from collections.abc import Sequence

from daf.core.code_format import code_bytes, header_bytes, plane_bytes

DEFAULT_PAGE_BYTES = 4096
_PAGE_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
TABLE_ENTRY_BYTES = 4
DEVICE_ENTRY_BYTES = 8  # of the table that a device reads, beside the pool's own

Elements = tuple[int, int]  # how many, and in how many bits each


def choose_page_bytes(
    tensors: Sequence[Elements], waste: float = 0.01, entry_bytes: int = TABLE_ENTRY_BYTES
) -> int:
    """Return the largest page whose padding and page tables stay below ``waste`` of the payload.

    ``tensors`` are the (elements, bits) alive together; ``entry_bytes`` is a page table entry's
    size. Small pages waste less, large ones cost fewer operations. Sizes from 128 bytes to 64 KiB
    are tried; if none is good enough, the least wasteful is taken.
    """
    if not tensors:
        return DEFAULT_PAGE_BYTES
    lost = {
        size: sum(_lost(size, entry_bytes, *tensor) for tensor in tensors) for size in _PAGE_SIZES
    }
    payload = sum(code_bytes(*tensor) for tensor in tensors)
    good = [size for size in _PAGE_SIZES if lost[size] <= waste * payload]
    return max(good, default=min(lost, key=lost.__getitem__))


def _lost(page_bytes: int, entry_bytes: int, count: int, bits: int) -> int:
    plane, headers = plane_bytes(count, 1), header_bytes(count)
    pages = bits * -(-plane // page_bytes) + -(-headers // page_bytes)
    return pages * (page_bytes + entry_bytes) - bits * plane - headers


class PageFitter:
    """Fits page sizes to the tensors that lived together last time."""

    WASTE = 0.0025  # of the payload; below that, larger pages only mean fewer of them

    def __init__(self, entry_bytes: int = TABLE_ENTRY_BYTES) -> None:
        self._entry_bytes = entry_bytes
        self._seen: list[Elements] = []
        self._fitted: list[Elements] = []
        self._page_bytes = DEFAULT_PAGE_BYTES

    def note(self, count: int, bits: int) -> None:
        """Count one more live tensor."""
        self._seen.append((count, bits))

    def choose(self, count: int, bits: int) -> int:
        """Return the page size for an empty pool; the arguments are those of its first tensor."""
        if not self._seen:  # only one tensor is known; networks have smaller ones behind the first
            guessed = [(count // part, bits) for part in (1, 4, 16)]
            return min(DEFAULT_PAGE_BYTES, self._fit(guessed))
        if self._seen != self._fitted:
            self._fitted = self._seen
            self._page_bytes = self._fit(self._fitted)
        self._seen = []
        return self._page_bytes

    def _fit(self, tensors: Sequence[Elements]) -> int:
        return choose_page_bytes(tensors, self.WASTE, self._entry_bytes)
