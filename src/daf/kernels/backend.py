"""The interface to the kernels of every type of device.

``planes`` is what a store's planes yield while open or pinned; every backend writes the same bits.
Tensors are dense and in memory order.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from daf.core.code_format import ElementType
from daf.core.errors import CodecError
from daf.kernels import RangeStrategy
from daf.kernels import normalisation as norms

# Float32 that a fused normalisation decodes at a time on a GPU, whose cache holds it; never tuned.
PART_BYTES = 32 << 20
_ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float16: ElementType.FLOAT16,
}


class Backend(Protocol):
    """Codecs, reductions and normalisations of one type of device."""

    def encode_values(self, code: norms.CodedValues, encoding: norms.Encoding) -> bool:
        """Write the code of values, and the output that belongs to them.

        False if a value is known not to be finite: its block decodes to NaN.
        """

    def decode_values(self, code: norms.CodedValues, decoding: norms.Decoding) -> None:
        """Write the values from the planes that are left."""

    def encode_elements(
        self, source: Tensor, planes: Any, code: norms.ElementCode
    ) -> bool | Tensor:
        """Write rounded numbers of steps (a derivative's), a predicate's bits, or ``value - base``.

        Returns True, or () nonzero int32 on the device, if the planes are worthless: an element of
        a derivative code is not finite. Integers lie in ``base … base + 2**bits - 1``.
        """

    def decode_elements(self, planes: Any, out: Tensor, code: norms.ElementCode) -> None:
        """Write the values, the two of a mask, an interval's level, or ``code + base``."""

    def measure_ranges(
        self, items: Tensor, strategy: RangeStrategy, channels: int, inner: int
    ) -> tuple[Tensor, Tensor]:
        """Return each channel's least and greatest element, (channels,) float32; NaN if any is."""

    def channel_statistics(
        self,
        x: Tensor,
        geometry: norms.Geometry,
        epsilon: float,
        running: norms.RunningStatistics | None,
    ) -> norms.Statistics:
        """Measure every channel's statistics; running ones follow in place.

        Their versions stay as they are, as after PyTorch's own, which saves them for backward.
        """

    def emit(self, encoding: norms.Encoding) -> None:
        """Write an encoding's output without a code."""

    def derive(self, values: norms.KeptValues, decoding: norms.Decoding) -> None:
        """Write again what ``emit`` wrote."""

    def sum_gradient(
        self, values: norms.Values, given: norms.MaskedGradient, geometry: norms.Geometry
    ) -> norms.Sums:
        """Return sums of the masked gradient, written if asked, and of its products with values."""

    def gradient_factors(
        self,
        sums: norms.Sums,
        geometry: norms.Geometry,
        inverse_deviation: Tensor,
        gamma: Tensor | None,
        gradients: norms.VectorGradients,
    ) -> norms.Factors:
        """Return the factors of ``write_input_gradient``; write the gradients of gamma and beta."""

    def write_input_gradient(
        self, values: norms.Values, given: norms.MaskedGradient, factors: norms.Factors
    ) -> None:
        """Write ``masked gradient * b.scale + a(values)``, ``factors`` (a, b), perhaps in place."""

    def backward_rows(self, values: norms.Values, job: norms.RowBackward) -> norms.Sums | None:
        """Run backward of a normalisation of rows; returns (length,) float64 sums if asked for."""


def is_codable(dtype: torch.dtype) -> bool:
    """True if floats of this dtype have codes: float32, bfloat16 and float16."""
    return dtype in _ELEMENT_TYPES


def element_type(dtype: torch.dtype) -> ElementType:
    """Return the kernels' number of a dtype; CodecError if its floats have no code."""
    try:
        return _ELEMENT_TYPES[dtype]
    except KeyError:
        known = ", ".join(str(known) for known in _ELEMENT_TYPES)
        raise CodecError(f"asked to code {dtype}; codes exist for {known}: keep it") from None
