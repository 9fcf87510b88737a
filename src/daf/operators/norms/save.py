"""What fused normalisations hold for backward, by channel or by row, and how it is read.

Tensors are dense; float32 on the host, any float with a code on a device. Normalised values come
from a code or from the input itself (:class:`KeptValues`).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from daf.codecs.codes import ElementsCode, ValueCode, Values, pinned
from daf.codecs.layout import layout_of
from daf.codecs.scratch import Scratch
from daf.core.policy import Method, Treatment
from daf.kernels.devices import backend_of
from daf.kernels.normalisation import Channels, CodedValues, Decoding, KeptValues
from daf.operators.fused_function import FusedSave
from daf.saved_tensors.ledger import Holding, Ledger
from daf.saved_tensors.packed_tensor import Kept, Stored

Source = Stored[ValueCode] | Kept
NormValues = ValueCode | KeptValues


class ComputedValues(Values):
    """The values of a resident input, recomputed when read: a whole code of no bytes."""

    __slots__ = ("_forward", "_read", "count")
    in_store = False
    nbytes = 0
    treatment = Treatment(Method.KEEP, 32)

    def __init__(self, read: Callable[[], Tensor], count: int, forward: Channels) -> None:
        self._read, self._forward = read, forward
        self.count = count

    def _write(self, decoding: Decoding) -> None:
        """Write the values bit for bit as ``emit`` did."""
        backend_of(decoding.out).derive(KeptValues(self._read(), self._forward), decoding)


@contextmanager
def reading(
    values: NormValues, mask: ElementsCode | None = None
) -> Iterator[tuple[CodedValues | KeptValues, Any]]:
    """Pin normalised values, and a mask's planes, for kernels to read inside."""
    with pinned(mask) as chosen:
        if isinstance(values, KeptValues):
            yield values, chosen
            return
        with values.planes.pinned() as planes:
            yield values.at(planes), chosen


class NormSave(FusedSave):
    """Normalised values as a code, or the input that yields them; gamma and beta.

    ``result`` maps normalised values to the operator's result; None without gamma and beta.
    ``counted`` counts the statistics' bytes.
    """

    __slots__ = ("_counted", "result", "source")

    def __init__(
        self, x: Tensor, source: Source, result: Stored[Channels] | None, counted: Holding
    ) -> None:
        super().__init__(layout_of(x))
        self.source, self.result = source, result
        self._counted = counted

    @property
    @abstractmethod
    def forward(self) -> Channels:
        """The affine from the input to the normalised values."""

    @property
    @abstractmethod
    def inverse(self) -> Channels:
        """The affine from the normalised values to the input."""

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the normalisation's input."""
        if isinstance(self.source, Kept):
            return self.source.restore(scratch)
        out = scratch.empty(self.layout)
        self.source.content.decode(out, self.inverse)
        return out

    @property
    def gamma(self) -> Tensor | None:
        """The copy of gamma, flat float32."""
        return None if self.result is None else self.result.content.scale

    @property
    def code(self) -> Stored[ValueCode] | None:
        """The code of the normalised values; None where the input itself is held."""
        return None if isinstance(self.source, Kept) else self.source

    def values(self, ledger: Ledger, count: int) -> Stored[Values]:
        """Return the ``count`` normalised values for tensors that are derived from them."""
        if isinstance(self.source, Kept):
            return computed_values(self.source, self.forward, count, ledger)
        return self.source

    def read_values(self) -> NormValues:
        """Return the normalised values as backward's kernels take them."""
        if isinstance(self.source, Kept):
            return KeptValues(self.source.restore(Scratch()), self.forward)
        return self.source.content


def computed_values(kept: Kept, forward: Channels, count: int, ledger: Ledger) -> Stored[Values]:
    """Return ``forward`` of a kept tensor as values that others derive from; no bytes are added."""
    return Stored(ledger, ComputedValues(lambda: kept.restore(Scratch()), count, forward))
