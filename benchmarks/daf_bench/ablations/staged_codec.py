"""Min-max codes of a tensor's range made in stages, as by two processors whose layouts differ.

PyTorch's operators quantize into bytes, pack neighbours into bytes, and take these apart again for
the planes that the other side reads: what DAF's unified layout (arXiv 2507.07149) and one native
pass save. The codes are those of ``RANGED``, and hold as many bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.codecs import ranges
from daf.codecs.codes import ElementsCode
from daf.codecs.layout import in_memory_order
from daf.codecs.ranged import grid_of
from daf.codecs.registry import register_codec
from daf.core.errors import CodecError
from daf.core.policy import Method, Treatment
from daf.kernels import Codec
from daf.kernels.normalisation import ElementCode
from daf.pool.store import Store
from daf_bench.kernels.bit_packing import WIDTHS, packed_neighbours, unpacked_neighbours

STAGED = "staged min-max"


class StagedCode:
    """A dense tensor of CPU floats in ``bits`` (1, 2 or 4) each; its range is the tensor's."""

    __slots__ = ("_grid", "_planes")
    in_store = True

    def __init__(self, store: Store, tensor: Tensor, bits: int, key: int) -> None:
        """Encode; CodecError if ``bits`` are others."""
        if bits not in WIDTHS:
            raise CodecError(f"asked for {bits} bits in stages; give 1, 2 or 4")
        flat = in_memory_order(tensor)
        low, high = ranges.ours().ends(flat)
        self._grid = grid_of(low[None], high[None], bits, 1)
        steps = _quantized(flat, bits, self._grid.to_steps.scale, self._grid.to_steps.shift, key)
        per_byte = 8 // bits
        packed = packed_neighbours(F.pad(steps, (0, -len(steps) % per_byte)), bits)
        apart = unpacked_neighbours(packed, bits)[: len(steps)]
        planes = ElementsCode.encode(store, apart, bits, ElementCode(Codec.INTEGERS))
        assert planes is not None  # integers are finite
        self._planes = planes

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self._planes.nbytes

    def decode(self, out: Tensor) -> None:
        """Write the values into a dense tensor of the coded count."""
        steps = torch.empty(self._planes.count, dtype=torch.uint8)
        self._planes.decode(steps)
        affine = self._grid.from_steps
        in_memory_order(out).copy_(steps.float().mul_(affine.scale).add_(affine.shift))


def _quantized(flat: Tensor, bits: int, scale: Tensor, shift: Tensor, key: int) -> Tensor:
    """Numbers of steps (uint8), rounded up as often as a value lies above the lower one."""
    generator = torch.Generator().manual_seed(key % 2**63)
    scaled = flat.float().mul(scale).add_(shift)
    rounded = scaled.add_(torch.rand(len(flat), generator=generator)).floor_()
    return rounded.clamp_(0, 2**bits - 1).to(torch.uint8)


def staged(bits: int) -> Treatment:
    """The treatment by this codec, which is registered here."""

    def encode(store: Store, tensor: Tensor, treatment: Treatment, key: int) -> StagedCode | None:
        return StagedCode(store, tensor, treatment.bits, key) if tensor.is_cpu else None

    register_codec(STAGED, encode)
    return Treatment(Method.REGISTERED, bits, codec=STAGED)
