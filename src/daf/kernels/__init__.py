"""The kernel contract: what every backend computes, to the byte, in ``core.code_format``'s layout.

``tests/helpers/reference`` is the oracle: each operation, readable in NumPy. A backend is correct
if its bytes equal the oracle's. ``docs/format.md`` spells out the arithmetic.
"""

import ctypes
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import NamedTuple

from daf.core.code_format import MINMAX_BITS, ROTATED_BITS, WORD_BYTES, words_per_plane

ROWS_PER_SPAN = 256  # of sums over rows; as in csrc/norms/rows.h


class Codec(StrEnum):
    """What planes may hold: sections 4 to 6 of ``docs/format.md``."""

    ROTATED = "rotated"
    MINMAX = "minmax"
    STEPS = "steps"
    MASK = "mask"
    DERIVATIVE = "derivative"
    INTEGERS = "integers"


CODEC_BITS: Mapping[Codec, range | tuple[int, ...]] = {
    Codec.ROTATED: ROTATED_BITS,
    Codec.MINMAX: MINMAX_BITS,
    Codec.STEPS: MINMAX_BITS,
    Codec.MASK: (1,),
    Codec.DERIVATIVE: range(1, 9),
    Codec.INTEGERS: range(1, 65),
}


class RangeStrategy(IntEnum):
    """How the partial ranges of threads are combined (DAF, arXiv 2507.07149); native numbers."""

    TREE = 0  # each thread's accumulators are folded pairwise
    ATOMICS = 1  # each element is compared with its channel's shared cell, written if beyond it
    HYBRID = 2  # own accumulators, then one atomic comparison per thread and channel


class PageFields(NamedTuple):
    """Where the planes of one tensor lie in pages: ``paging::View`` of ``csrc/pool/view.h``.

    Run ``r`` holds ``8 * page_bytes`` elements (the last perhaps fewer). Its plane ``p`` is page
    ``table[p * runs + r]`` of ``region``. The headers of all runs follow each other in the pages
    from ``table[bits * runs]`` on. The first ``full_runs`` runs have their first ``kept`` planes,
    the others one less. ``region`` and ``table`` (uint32) are addresses.
    """

    region: int
    page_bytes: int
    table: int
    elements: int
    runs: int
    full_runs: int
    bits: int
    kept: int

    @property
    def is_whole(self) -> bool:
        """True if every plane of every run is resident."""
        return self.kept == self.bits and self.full_runs == self.runs

    @classmethod
    def flat(cls, address: int, elements: int, bits: int) -> "PageFields":
        """Return one run of planes that follow each other at an address, headers behind them."""
        page_bytes = max(1, words_per_plane(elements)) * WORD_BYTES
        table = ctypes.addressof(_IN_ORDER)
        return cls(address, page_bytes, table, elements, 1, 1, bits, bits)


_IN_ORDER = (ctypes.c_uint32 * 65)(*range(65))  # pages of 64 planes, the most, and of headers


class RowMoments(NamedTuple):
    """Rows (runs of ``affine.inner``, a channel each) to measure first, writing the affine."""

    epsilon: float  # added under the root
    centred: bool  # ``(x - mean) / deviation``, else ``x`` over the root of its mean square
