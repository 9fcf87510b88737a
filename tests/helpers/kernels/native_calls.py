"""The native kernels called with addresses, one function for each: the jobs that they are given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from daf.core.code_format import ElementType, Predicate
from daf.kernels import Codec, PageFields
from daf.kernels.cpu import codecs, reductions
from daf.kernels.cpu.job import Job
from daf.kernels.normalisation import (
    Channels,
    Geometry,
    MaskedGradient,
    NormOutput,
    RowBackward,
    Sums,
)


class Memory(NamedTuple):
    """Memory at an address, of which a job asks what it asks of a tensor."""

    address: int
    count: int = 1

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.count


def _memory(address: int) -> Any:
    return Memory(address) if address else None


def _planes(fields: PageFields | None) -> Any:
    return fields and SimpleNamespace(fields=fields)


def vectors(channels: int, inner: int, scale: int, shift: int) -> Channels:
    places: Any = (Memory(scale, channels), Memory(shift, channels))
    return Channels(*places, inner)


def affine_of(affine: Any) -> Channels | None:
    """The oracle's affine; keep it alive while it is used."""
    if affine is None:
        return None
    at = (affine.scale.ctypes.data, affine.shift.ctypes.data)
    return vectors(len(affine.scale), affine.inner, *at)


def output(
    destination: int,
    addend: int = 0,
    affine: Channels | None = None,
    most: float = math.inf,
    mask: PageFields | None = None,
) -> NormOutput:
    return NormOutput(_memory(destination), affine, _memory(addend), _planes(mask), most)


def channel_sums(channels: int, inner: int, sums: int, squares: int, workspace: int) -> Any:
    """The fields of a job that takes sums of channels."""
    return {
        "sums": Sums(_memory(sums), _memory(squares)),
        "geometry": Geometry(channels, inner, 0),
        "workspace": _memory(workspace),
    }


def measure_ranges(
    source, element_type, count, least, greatest, workspace, threads, channels, inner, strategy
) -> None:
    geometry, ends = Geometry(channels, inner, count), (Memory(least), Memory(greatest))
    job = Job(threads, count, element_type, source, geometry=geometry)
    reductions.measure_ranges(job._replace(workspace=_memory(workspace)), *ends, strategy)


def gradient_pass(
    gradient: int,
    destination: int = 0,
    of_value: Channels | None = None,
    of_gradient: Channels | None = None,
    *,
    sums: Any = None,
    mask: PageFields | None = None,
) -> Any:
    """The fields of a job that runs a pass of a normalisation's backward."""
    given = MaskedGradient(_memory(gradient), _planes(mask), _memory(destination))
    factors = {"of_value": of_value, "of_gradient": of_gradient}
    return {"gradient": given, **factors, **(sums or {})}


def row_gradient(
    length: int,
    *,
    centred: bool,
    gradient: int,
    scale: int,
    workspace: int,
    destination: int = 0,
    gamma: int = 0,
    sums: int = 0,
    products: int = 0,
) -> Any:
    """The fields of a job that runs the backward of rows."""
    tensors = map(_memory, (gradient, destination, gamma, scale))
    summing = bool(sums or products)
    return {
        "row_gradient": RowBackward(length, centred, *tensors, summing),
        "sums": Sums(_memory(sums), _memory(products)) if summing else None,
        "workspace": _memory(workspace),
    }


def _encode(codec, source, element_type, fields, threads, **options: Any) -> bool:
    job = Job(threads, fields.elements, element_type, source, pages=fields, **options)
    return codecs.encode(codec, job)


def _decode(codec, fields, destination, element_type, threads, **options: Any) -> None:
    job = Job(threads, fields.elements, element_type, destination=destination, pages=fields)
    codecs.decode(codec, job._replace(**options))


def encode_rotated(
    source, element_type, fields, key, threads, affine=None, emission=None, rows=None
) -> bool:
    options = {"key": key, "affine": affine, "emission": emission, "rows": rows}
    return _encode(Codec.ROTATED, source, element_type, fields, threads, **options)


def decode_rotated(
    fields: PageFields,
    key: int,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: Channels | None = None,
    mask: PageFields | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
) -> None:
    options = {"after": affine, "mask": mask, "accumulate": accumulate, "blocks": blocks}
    options |= {"key": key}
    _decode(Codec.ROTATED, fields, destination, element_type, threads, **options)


def encode_minmax(
    source, element_type, fields, key, threads, affine=None, emission=None, rows=None
) -> bool:
    options = {"key": key, "affine": affine, "emission": emission, "rows": rows}
    return _encode(Codec.MINMAX, source, element_type, fields, threads, **options)


def decode_minmax(
    fields, destination, element_type, threads, affine=None, mask=None, accumulate=False, **blocks
) -> None:
    options = {"after": affine, "mask": mask, "accumulate": accumulate, **blocks}
    _decode(Codec.MINMAX, fields, destination, element_type, threads, **options)


def encode_steps(source, element_type, fields, key, threads, affine=None) -> None:
    _encode(Codec.STEPS, source, element_type, fields, threads, key=key, affine=affine)


def decode_steps(fields, destination, element_type, threads, affine=None) -> None:
    _decode(Codec.STEPS, fields, destination, element_type, threads, after=affine)


def encode_mask(
    source: int,
    element_type: ElementType,
    fields: PageFields,
    predicate: Predicate,
    low: float,
    high: float,
    threads: int,
) -> None:
    options = {"predicate": predicate, "low": low, "high": high}
    _encode(Codec.MASK, source, element_type, fields, threads, **options)


def decode_mask(fields, off_value, on_value, destination, element_type, threads) -> None:
    options = {"low": off_value, "high": on_value}
    _decode(Codec.MASK, fields, destination, element_type, threads, **options)


def encode_derivative(source, element_type, fields, lines, key, threads) -> bool:
    options = {"table": lines, "key": key}
    return _encode(Codec.DERIVATIVE, source, element_type, fields, threads, **options)


def decode_derivative(fields, levels, destination, element_type, threads) -> None:
    _decode(Codec.DERIVATIVE, fields, destination, element_type, threads, table=levels)


def encode_integers(source, item_bytes, fields, base, threads) -> None:
    options = {"item_bytes": item_bytes, "base": base}
    _encode(Codec.INTEGERS, source, ElementType.FLOAT32, fields, threads, **options)


def decode_integers(fields, base, destination, item_bytes, threads) -> None:
    options = {"item_bytes": item_bytes, "base": base}
    _decode(Codec.INTEGERS, fields, destination, ElementType.FLOAT32, threads, **options)


def emit(source, count, affine, emission: NormOutput, threads, rows=None) -> None:
    codecs.read(Job(threads, count, source=source, affine=affine, emission=emission, rows=rows))


def derive(
    source, count, affine, result, destination, threads, mask=None, accumulate=False, blocks=None
) -> None:
    job = Job(threads, count, source=source, affine=affine, destination=destination, after=result)
    codecs.copy(job._replace(mask=mask, accumulate=accumulate, blocks=blocks))


def backward_kept(source, count, affine, gradient, threads) -> None:
    codecs.copy(Job(threads, count, source=source, affine=affine, **gradient))


def backward_rotated(fields, key, gradient, threads) -> None:
    code = {"pages": fields, "key": key}
    codecs.decode(Codec.ROTATED, Job(threads, fields.elements, **code, **gradient))


def backward_minmax(fields, gradient, threads) -> None:
    job = Job(threads, fields.elements, pages=fields, **gradient)
    codecs.decode(Codec.MINMAX, job)
