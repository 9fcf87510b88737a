"""The arithmetic of normalisations where a tensor is: the processor's kernels, or a device's.

Both sides have the same functions; ``normalised`` and ``normalised_rows`` describe them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from daf.codecs.cpu import Channels
from daf.codecs.dispatch import Values as Code
from daf.codecs.dispatch import is_coded_on_device
from daf.kernels import RowMoments
from daf.operators.norms import channels_cpu, rows_cpu
from daf.operators.norms.channels_cpu import Geometry, RunningStatistics, Statistics, Sums
from daf.operators.norms.rows_cpu import RowBackward, RowSums


class ChannelNorms(Protocol):
    """Normalisation of channels. Values, masks and emissions are those of the same side."""

    @property
    def CodedValues(self) -> Callable[[Any], Any]:  # noqa: N802 - a class
        """The values of a code."""

    @property
    def KeptValues(self) -> Callable[[Tensor, Channels], Any]:  # noqa: N802 - a class
        """An affine of the input that is held."""

    @property
    def ComputedValues(self) -> Callable[[Callable[[], Tensor], int, Channels], Code]:  # noqa: N802
        """The same as a code, for whoever derives something from it."""

    def take_statistics(
        self, x: Tensor, geometry: Geometry, epsilon: float, running: RunningStatistics | None
    ) -> Statistics:
        """Of every channel; running ones follow."""

    def emission(
        self,
        out: Tensor,
        result: Channels | None,
        addend: Tensor | None,
        mask: Any,
        most: float = ...,
    ) -> Any:
        """What to write beside a code."""

    def emit(self, x: Tensor, forward: Channels, written: Any) -> None:
        """Write it without one."""

    def sum_gradient(
        self, values: Any, gradient: Tensor, mask: Any, written: Tensor | None, geometry: Geometry
    ) -> Sums:
        """Backward's first pass."""

    def take_factors(
        self,
        sums: Sums,
        geometry: Geometry,
        inverse_deviation: Tensor,
        gamma: Tensor | None,
        gradients: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Channels, Channels]:
        """What the second pass multiplies by."""

    def write_input_gradient(
        self,
        values: Any,
        gradient: Tensor,
        mask: Any,
        written: Tensor,
        factors: tuple[Channels, Channels],
    ) -> None:
        """Backward's second pass."""


class RowNorms(Protocol):
    """Normalisation of rows."""

    def emit_rows(self, x: Tensor, affine: Channels, moments: RowMoments, written: Any) -> None:
        """Forward without a code."""

    def backward_rows(self, asked: RowBackward, values: Any) -> RowSums | None:
        """Backward from a code, or from ``KeptRows``."""


def channel_norms(x: Tensor) -> ChannelNorms:
    """For channels of a tensor like ``x``."""
    if is_coded_on_device(x):
        from daf.operators.norms import channels_cuda

        return channels_cuda
    return channels_cpu


def row_norms(x: Tensor) -> RowNorms:
    """For rows of a tensor like ``x``."""
    if is_coded_on_device(x):
        from daf.operators.norms import rows_cuda

        return rows_cuda
    return rows_cpu
