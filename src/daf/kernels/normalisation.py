"""What kernels are asked for on any device, as tensors: value codes and passes of normalisations.

Element i in memory order is of channel ``(i // inner) % channels``; a row is a channel of one run.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import Predicate
from daf.core.policy import Method, Treatment
from daf.kernels import Codec, RowMoments


class Channels(NamedTuple):
    """``value * scale[c] + shift[c]``, two roundings in fp32, with ``c = (i // inner) % channels``.

    ``i`` is the place in memory order: ``inner`` is 1 for channels-last, height * width for NCHW.
    """

    scale: Tensor  # (channels,) float32, contiguous, on the values' device
    shift: Tensor  # likewise
    inner: int

    @property
    def in_store(self) -> bool:
        """False: the vectors are tensors of their own."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of both vectors."""
        return self.scale.nbytes + self.shift.nbytes

    @classmethod
    def times(cls, factor: float, device: torch.device) -> "Channels":
        """Return multiplication by a number, whatever the channel."""
        scale = torch.full((1,), factor, dtype=torch.float32, device=device)
        return cls(scale, torch.zeros_like(scale), 1)


class Geometry(NamedTuple):
    """The channel of each element, and the number of elements."""

    channels: int
    inner: int
    elements: int

    @property
    def per_channel(self) -> int:
        """Elements of one channel."""
        return self.elements // self.channels


class RunningStatistics(NamedTuple):
    """Running statistics, contiguous (channels,) float32, and their momentum."""

    mean: Tensor
    variance: Tensor
    momentum: float


class Statistics(NamedTuple):
    """The statistics that forward used, (channels,) float32 each."""

    mean: Tensor
    inverse_deviation: Tensor

    def forward(self, inner: int) -> Channels:
        """Return the affine from the input to the normalised value."""
        return Channels(self.inverse_deviation, -self.mean * self.inverse_deviation, inner)

    def inverse(self, inner: int) -> Channels:
        """Return the affine from the normalised value to the input."""
        return Channels(self.inverse_deviation.reciprocal(), self.mean, inner)


class Sums(NamedTuple):
    """Sums of the gradient, and of its products with the values; (channels,) float64 each."""

    sums: Tensor
    products: Tensor


class NormOutput(NamedTuple):
    """What forward writes from its normalised values, with or without encoding them.

    ``out`` gets ``result`` of the values plus the ``addend``. With a ``mask``, values not above 0
    become 0 and values not below ``most`` become ``most``; all others, and NaN, set their bit.
    """

    out: Tensor  # dense; to native kernels float32, as many elements as are encoded
    result: Channels | None = None  # gamma and beta
    addend: Tensor | None = None  # in the layout of ``out``
    mask: Any = None  # of a ReLU, an unwritten code; to kernels, its open planes
    most: float = math.inf  # the ReLU's upper bound


class ElementCode(NamedTuple):
    """A code of every element by itself, of *steps*, *mask*, *derivative* or *integers*.

    Written from elements, and read by another record, of what the codes then stand for.
    """

    codec: Codec
    channels: Channels | None = None  # steps: makes steps of values; read: values of them
    key: int = 0  # steps, derivative: the seed
    predicate: Predicate = Predicate.ABOVE  # mask
    low: float = 0.0  # mask: the predicate's bounds; read: what a clear bit stands for
    high: float = math.nan  # mask: likewise, and a set one
    table: Tensor | None = None  # derivative: ``derivative_lines``; read: 2**bits levels
    base: int = 0  # integers: taken off before, added behind


class CodedValues(NamedTuple):
    """Values in a *rotated* or *minmax* code, or room for them; ``planes`` are open or pinned."""

    planes: Any
    treatment: Treatment
    key: int
    elements: int

    @property
    def codec(self) -> Codec:
        """The codec of the treatment."""
        return Codec.ROTATED if self.treatment.method is Method.ROTATED else Codec.MINMAX


class KeptValues(NamedTuple):
    """Normalised values recomputed as ``forward`` of the input."""

    x: Tensor
    forward: Channels


Values = CodedValues | KeptValues


class Encoding(NamedTuple):
    """Values to read, ``channels`` of the source, and the ``output`` to write of them meanwhile."""

    source: Tensor
    channels: Channels | None = None
    rows: RowMoments | None = None  # how to measure and write the vectors of ``channels`` first
    output: NormOutput | None = None


class Decoding(NamedTuple):
    """Where values go: ``channels`` of them, ``accumulate`` onto ``out``, planes of a ``mask``."""

    out: Tensor
    channels: Channels | None = None
    mask: Any = None
    accumulate: bool = False
    blocks: tuple[int, int] | None = None  # [first, last) of 256 that ``out`` holds; None: all


class MaskedGradient(NamedTuple):
    """A result's gradient, 0 where the planes of the ``mask`` are clear, and where to write it."""

    gradient: Tensor
    mask: Any
    written: Tensor | None


class RowBackward(NamedTuple):
    """The arguments of a row normalisation's backward besides values; sums only if ``summing``."""

    length: int
    centred: bool
    gradient: Tensor  # of the result
    written: Tensor | None  # receives the input's gradient; may be ``gradient``
    gamma: Tensor | None  # (length,)
    scale: Tensor  # (rows,), the affine's
    summing: bool


# Gradients of gamma and beta, (channels,) float32, to be written; None: not asked for.
VectorGradients = tuple[Tensor | None, Tensor | None]
# Of the input's gradient: of the values, and of the masked gradient, its scale alone.
Factors = tuple[Channels, Channels]
