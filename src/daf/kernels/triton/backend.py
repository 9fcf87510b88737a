"""The Triton kernels as a backend: tensors on a GPU, planes in its pages; nothing waits for it.

A normalisation decodes into float32 a part at a time. Importing raises KernelError without Triton.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS, block_count
from daf.kernels import Codec
from daf.kernels import normalisation as norms
from daf.kernels.backend import PART_BYTES, Backend
from daf.kernels.triton import codecs, reductions
from daf.kernels.triton import norms as passes
from daf.kernels.triton.launch import elements_in


class TritonBackend(Backend):
    """The backend of GPUs, on the current stream of the tensors' device."""

    measure_ranges = staticmethod(reductions.measure_ranges)
    gradient_factors = staticmethod(passes.channel_factors)

    def encode_values(self, code: norms.CodedValues, encoding: norms.Encoding) -> bool:
        """Measure, encode and write the output, by a kernel each; only the device knows of NaN."""
        source, channels, rows, output = encoding
        if rows is not None and channels is not None:
            passes.measure_rows(_items(source), channels, rows.epsilon, centred=rows.centred)
        codecs.encode_values(code, _items(source), channels)
        if output is not None:
            self.emit(encoding._replace(rows=None))
        return True

    def decode_values(self, code: norms.CodedValues, decoding: norms.Decoding) -> None:
        codecs.decode_values(code, decoding._replace(out=_items(decoding.out)))

    def encode_elements(
        self, source: Tensor, planes: Any, code: norms.ElementCode
    ) -> bool | Tensor:
        here = _there(code, source.device)
        worthless = codecs.encode_elements(_signed(_items(source)), planes, here)
        return worthless if code.codec is Codec.DERIVATIVE else False

    def decode_elements(self, planes: Any, out: Tensor, code: norms.ElementCode) -> None:
        codecs.decode_elements(planes, _signed(_items(out)), _there(code, out.device))

    def channel_statistics(
        self,
        x: Tensor,
        geometry: norms.Geometry,
        epsilon: float,
        running: norms.RunningStatistics | None,
    ) -> norms.Statistics:
        sums = reductions.measure_sums(_items(x), geometry.channels, geometry.inner)
        return passes.channel_statistics(sums, geometry.per_channel, epsilon, running)

    def emit(self, encoding: norms.Encoding) -> None:
        source, forward, rows, output = encoding
        assert forward is not None
        assert output is not None
        if rows is not None:
            passes.measure_rows(_items(source), forward, rows.epsilon, centred=rows.centred)
        addend = None if output.addend is None else _items(output.addend)
        passes.emit(_items(source), forward, output._replace(out=_items(output.out), addend=addend))

    def derive(self, values: norms.KeptValues, decoding: norms.Decoding) -> None:
        x, forward = values
        passes.derive(_items(x), forward, decoding._replace(out=_items(decoding.out)))

    def sum_gradient(
        self, values: norms.Values, given: norms.MaskedGradient, geometry: norms.Geometry
    ) -> norms.Sums:
        gradient, mask, written = given
        items = _items(gradient)
        if mask is not None and written is not None:
            codecs.apply_mask(mask, items, _items(written))
            items, mask = _items(written), None
        elif written is not None and written is not gradient:
            written.copy_(gradient)
        sums = passes.ChannelProducts(items, geometry.channels, geometry.inner)
        for part in self._parts(values, sums.span_blocks, items.device):
            sums.add(part, mask)
        return sums.totals()

    def write_input_gradient(
        self, values: norms.Values, given: norms.MaskedGradient, factors: norms.Factors
    ) -> None:
        assert given.written is not None
        of_value, of_gradient = factors
        items, out, mask = _items(given.gradient), _items(given.written), given.mask
        for part in self._parts(values, 1, items.device):
            passes.write_gradient(items, part, out, of_gradient.scale, of_value, mask=mask)

    def backward_rows(self, values: norms.Values, job: norms.RowBackward) -> norms.Sums | None:
        """Run two passes over the values: sums by rows and columns, then the input's gradient."""
        given = _items(job.gradient)
        products = passes.RowProducts(job._replace(gradient=given))
        self._add_rows(products, values, given.device)
        columns = products.columns()
        if job.written is not None:
            out, factors = _items(job.written), (job.scale, products.of_value)
            for part in self._parts(values, 1, given.device):
                passes.write_gradient(given, part, out, *factors, gamma=job.gamma)
        return columns

    def _add_rows(self, products: passes.RowProducts, values: norms.Values, device: Any) -> None:
        """Add all parts; the last part's memory is free on return, for the second pass."""
        for part in self._parts(values, products.span_blocks, device):
            products.add(part)

    def _parts(
        self, values: norms.Values, span_blocks: int, device: torch.device
    ) -> Iterator[passes.Values]:
        if isinstance(values, norms.KeptValues):
            whole = (0, block_count(values.x.numel()))
            yield passes.Values(_items(values.x), whole, values.forward)
            return
        # They are decoded into memory that the next part reuses.
        count, blocks = values.elements, block_count(values.elements)
        step = span_blocks * max(1, PART_BYTES // (4 * BLOCK_ELEMENTS * span_blocks))
        size = elements_in((0, min(step, blocks)), count)
        room = torch.empty(size, dtype=torch.float32, device=device)
        for first in range(0, blocks, step):
            here = (first, min(blocks, first + step))
            part = room[: elements_in(here, count)]
            codecs.decode_values(values, norms.Decoding(part, blocks=here))
            yield passes.Values(part, here)


def _items(tensor: Tensor) -> Tensor:
    """Return (elements,) of a dense tensor in memory order, without its graph."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())


def _there(code: norms.ElementCode, device: torch.device) -> norms.ElementCode:
    return code if code.table is None else code._replace(table=_table_on(code.table, device))


@cache
def _table_on(table: Tensor, device: torch.device) -> Tensor:
    """Copy an activation's table once; there are few of them."""
    return table.to(device)


def _signed(items: Tensor) -> Tensor:
    return items.view(torch.int8) if items.dtype == torch.uint8 else items
