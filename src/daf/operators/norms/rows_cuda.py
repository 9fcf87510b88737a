"""``normalised_rows`` on a device, by Triton's kernels."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from daf.codecs.cpu import Channels
from daf.codecs.cuda import DeviceValueCode
from daf.codecs.cuda_outputs import DeviceEmission, affine_of
from daf.codecs.layout import in_memory_order
from daf.kernels import RowMoments
from daf.kernels.triton import channel_norm as triton_norm
from daf.kernels.triton import row_norm as triton_rows
from daf.operators.norms.channels_cuda import CodedValues, KeptValues
from daf.operators.norms.rows_cpu import KeptRows, RowBackward, RowSums


def emit_rows(x: Tensor, affine: Channels, moments: RowMoments, written: DeviceEmission) -> None:
    """Forward without a code; ``affine`` is measured first."""
    epsilon, centred = moments
    triton_rows.measure_rows(in_memory_order(x), affine_of(affine), epsilon, centred=centred)
    written.carry_out(x, affine)


def backward_rows(asked: RowBackward, values: DeviceValueCode | KeptRows) -> RowSums | None:
    """Two passes over the values: sums by rows and columns, then the input's gradient."""
    given = in_memory_order(asked.gradient)
    source = KeptValues(*values) if isinstance(values, KeptRows) else CodedValues(values)
    options = {"centred": asked.centred, "summing": asked.summing}
    products = triton_rows.RowProducts(given, asked.scale, asked.length, asked.gamma, **options)
    # Both passes must read the same planes, whoever lowers a cap meanwhile.
    with nullcontext() if isinstance(values, KeptRows) else values.planes.pinned():
        _add_all(source, products)
        columns = products.columns()
        if asked.written is not None:
            out = in_memory_order(asked.written)
            factors = products.of_value
            for part in source.parts(1):
                triton_norm.write_gradient(
                    given, part, out, asked.scale, factors, gamma=asked.gamma
                )
    return None if columns is None else RowSums(*columns)


def _add_all(source: KeptValues | CodedValues, products: triton_rows.RowProducts) -> None:
    """The room of the last part is free when this returns, for the second pass."""
    for part in source.parts(products.span_blocks):
        products.add(part)
