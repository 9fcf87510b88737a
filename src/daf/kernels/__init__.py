"""The kernel contract: what every backend computes, to the byte.

``reference`` states each operation readably in NumPy and is the oracle;
``cpu`` runs the native kernels. A backend is correct when its bytes equal the
oracle's. The arithmetic is spelled out in ``docs/format.md``.

Layout, shared by every codec (*unified layout*): a tensor of ``count``
elements in memory order is padded to whole blocks of 256. A ``b``-bit code is
``b`` planes, most significant first; a plane is ``words_per_plane(count)``
little-endian 32-bit words, and bit ``k`` of word ``w`` of a plane is that
plane's bit of element ``32 * w + k``. Planes of one tensor follow each other
in memory. Headers are an array of their own: per block two bf16 numbers.
"""

from __future__ import annotations

import ctypes
import math
from enum import IntEnum
from typing import NamedTuple

from daf.core.code_format import WORD_BYTES, words_per_plane

ROWS_PER_SPAN = 256  # of sums over rows; as in csrc/norms/rows.h


class ChannelAffine(NamedTuple):
    """``value * scale[c] + shift[c]``, two roundings in fp32, with ``c = (i // inner) % channels``.

    ``i`` is the element's place in memory order, so ``inner`` is 1 for
    channels-last memory and height * width for contiguous NCHW. ``scale`` and
    ``shift`` are addresses of ``channels`` float32 numbers.
    """

    channels: int
    inner: int
    scale_pointer: int
    shift_pointer: int


class ChannelSums(NamedTuple):
    """Where the sums of each channel go: ``c = (i // inner) % channels`` as in ChannelAffine.

    ``sums_pointer`` and ``squares_pointer`` are addresses of ``channels`` float64
    numbers each, to be written; ``workspace_pointer`` is that of as many bytes
    as ``cpu.reductions.sums_workspace_bytes`` says. A whole tensor is one channel.
    """

    channels: int
    inner: int
    sums_pointer: int
    squares_pointer: int
    workspace_pointer: int


class RangeStrategy(IntEnum):
    """How the partial ranges of threads become one; the numbers are the native ones.

    ``TREE``: each thread reduces into accumulators of its own, whose rows are
    then folded pairwise. ``ATOMICS``: each element is compared with the shared
    cell of its channel, written only where it is beyond it. ``HYBRID``:
    accumulators of each thread's own, then one atomic comparison for each
    thread and channel. (The three of DAF, arXiv 2507.07149.)
    """

    TREE = 0
    ATOMICS = 1
    HYBRID = 2


class PageFields(NamedTuple):
    """Where the planes of one tensor lie in pages: ``paging::View`` of ``csrc/pool/pool_view.h``.

    Run ``r`` holds ``8 * page_bytes`` elements (the last one perhaps fewer).
    Its plane ``p`` is page ``table[p * runs + r]`` of ``region``; headers of all
    runs follow each other in the pages from ``table[bits * runs]`` on. The first
    ``full_runs`` runs have their first ``kept`` planes, the others one less.
    ``region`` and ``table`` (uint32) are addresses.
    """

    region: int
    page_bytes: int
    table: int
    elements: int
    runs: int
    full_runs: int
    bits: int
    kept: int

    @classmethod
    def flat(cls, address: int, elements: int, bits: int) -> PageFields:
        """Planes that follow each other at an address, headers behind them: one run."""
        page_bytes = max(1, words_per_plane(elements)) * WORD_BYTES
        table = ctypes.addressof(_IN_ORDER)
        return cls(address, page_bytes, table, elements, 1, 1, bits, bits)


_IN_ORDER = (ctypes.c_uint32 * 65)(*range(65))  # pages of 64 planes, the most, and of headers


class Emission(NamedTuple):
    """A normalisation's forward, while an encoder reads what it codes (float32).

    ``destination`` gets ``value * scale[c] + shift[c]`` (``affine``, if there is one), plus
    ``addend``'s element (0: none). With a ``mask`` what is not above 0 becomes 0 and what is not
    below ``most`` becomes that; the others, and NaN, set their bit. Pointers are addresses of as
    many float32 numbers as are coded; a mask's pages may be of another size.
    """

    destination_pointer: int
    addend_pointer: int = 0
    affine: ChannelAffine | None = None
    most: float = math.inf
    mask: PageFields | None = None


class NormGradient(NamedTuple):
    """A pass of a normalisation's backward over its normalised values v (float32).

    g is the ``gradient``'s element, 0 where the ``mask``'s bit is clear. With
    ``sums``, takes those of g and, as squares, of g * v, and writes g to the
    ``destination`` unless that is 0. Without, writes ``g * of_gradient.scale[c] + (v *
    of_value.scale[c] + of_value.shift[c])``. Gradient and destination may be one.
    """

    gradient_pointer: int
    destination_pointer: int = 0
    of_value: ChannelAffine | None = None
    of_gradient: ChannelAffine | None = None
    sums: ChannelSums | None = None
    mask: PageFields | None = None


class GradientFactors(NamedTuple):
    """Addresses of what backward's second pass takes of its first one's sums.

    Sums and products are float64, the rest float32, ``channels`` of each. ``gamma`` may be 0 and so
    may ``of_gamma`` and ``of_beta``, which are then not written.
    """

    sums_pointer: int
    products_pointer: int
    inverse_deviation_pointer: int
    gamma_pointer: int
    value_scale_pointer: int
    value_shift_pointer: int
    gradient_scale_pointer: int
    of_gamma_pointer: int = 0
    of_beta_pointer: int = 0


class RunningMoments(NamedTuple):
    """Addresses of running mean and variance, float32, and how fast they follow."""

    mean_pointer: int
    variance_pointer: int
    momentum: float


class RowMoments(NamedTuple):
    """Rows are measured before they are read, and the affine of each is written.

    Rows are runs of ``affine.inner`` elements, one channel each; the affine's scale and shift
    then are addresses of room: ``(x - mean) / deviation`` where ``centred``, else ``x`` by the
    root of its mean square. ``epsilon`` is added under the root.
    """

    epsilon: float
    centred: bool


class RowGradient(NamedTuple):
    """Backward of a normalisation of rows of ``length`` over its normalised values (float32).

    ``gradient_pointer``: of the result. ``destination_pointer``: for the input's gradient, or the
    gradient itself, or 0 for none. ``gamma_pointer``: (length,), or 0 for none. ``scale_pointer``:
    (rows,), what the rows' affine multiplies with. ``sums_pointer`` and ``products_pointer``:
    (length,) float64 each, written: of the gradient (beta's) and of its product with the
    values (gamma's); 0 for neither. ``workspace_pointer``: as many bytes as
    ``rows.workspace_bytes`` says.
    """

    length: int
    centred: bool
    gradient_pointer: int
    destination_pointer: int
    gamma_pointer: int
    scale_pointer: int
    sums_pointer: int
    products_pointer: int
    workspace_pointer: int
