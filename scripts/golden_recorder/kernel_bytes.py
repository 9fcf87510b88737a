"""What the kernels write: every codec, normalisation and reduction, on every instruction set.

Codes are made by the code classes, in a store whose bytes can be read, so that what is recorded
are planes and headers as the format has them, and what comes back from them.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from adapter import TREE, derivative_lines, digest, element_codes, norms, range_measure
from torch import Tensor

SIZES = (1, 255, 256, 257, 4097, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEY = 0x9E3779B97F4A7C15
_POISON = 0xA5  # of bytes that no kernel writes
Record = dict[str, Any]


def record() -> Record:
    """Hashes by instruction set, kernel and case; reductions with them."""
    cases = (_values, _odd_values, _channels, _masks, _intervals, _integers, _steps, _averages)
    others = (_evictions, _channel_norms, _row_norms, _ranges, _sums)
    use, found = TREE.get("sets", "use_instruction_set"), {}
    for name in sys.modules[use.__module__].instruction_sets():
        with use(name):
            found[name] = {key: value for each in (*cases, *others) for key, value in each()}
    return found


def floats(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """(count,) seeded floats whose mean and spread differ from stretch to stretch."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    place = torch.arange(count, dtype=torch.float32)
    spread = 0.5 + (place // 100 % 7)
    return (torch.randn(count, generator=generator) * spread + place % 5 - 1.0).to(dtype)


def _store() -> Any:
    """A plain store that starts all memory with the same bytes and tells what they became."""
    plain = TREE.get("stores", "PlainStore")
    has_buffers = hasattr(plain, "allocate")  # of which planes were made, once

    class Readable(plain):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.given: list[tuple[int, int, Any]] = []

        def allocate(self, nbytes: int) -> Any:
            buffer = super().allocate(nbytes)
            return self._begun(buffer.pointer, buffer)

        def allocate_planes(self, *arguments: Any, **options: Any) -> Any:
            planes = super().allocate_planes(*arguments, **options)
            return planes if has_buffers else self._begun(planes.view.fields.region, planes)

        def _begun(self, address: int, room: Any) -> Any:
            ctypes.memset(address, _POISON, room.nbytes)
            self.given.append((address, room.nbytes, room))
            return room

        def content(self) -> bytes:
            return b"|".join(ctypes.string_at(*each[:2]) for each in self.given)

    return Readable()


def _treatments() -> Iterator[Any]:
    treatment, method = TREE.get("policy", "Treatment"), TREE.get("policy", "Method")
    # Earlier trees were told how often to rotate; later ones choose it by the block.
    every = ({"rounds": 1}, {"rounds": 2}) if hasattr(treatment, "rounds") else ({},)
    for bits in (1, 2, 3, 4):
        yield from (treatment(method.ROTATED, bits, **rounds) for rounds in every)
    yield from (treatment(method.MINMAX, bits) for bits in range(1, 9))


def _named(treatment: Any) -> str:
    return f"{treatment.method.value} {treatment.bits}, rounds {getattr(treatment, 'rounds', 1)}"


def _affine(channels: int, inner: int, seed: int = 7) -> Any:
    scale, shift = floats(2 * channels, seed=seed).view(2, channels).clone().unbind()
    return TREE.get("codecs", "Channels")(scale, shift, inner)


def _above(store: Any, tensor: Tensor, low: float = 0.0) -> Any:
    above = TREE.get("kernel_words", "Predicate").ABOVE
    return element_codes().mask(store, tensor, above, low)


def _decoded(decode: Callable[[Tensor], object], like: Tensor) -> Tensor:
    out = torch.full_like(like, 3)
    decode(out)
    return out


# --- codes ------------------------------------------------------------------------------------


def _values() -> Iterator[tuple[str, Record]]:
    make = TREE.get("codecs", "ValueCode")
    for treatment in _treatments():
        for dtype in DTYPES:
            for count in SIZES:
                store, x = _store(), floats(count, dtype)
                code = make(store, x, treatment, KEY)
                name = f"values/{_named(treatment)}/{dtype}/{count}"
                yield name, {"code": digest(store.content()), **_read(code, x)}


def _read(code: Any, x: Tensor) -> Record:
    """A code decoded whole, onto other values through a mask, and its last blocks alone."""
    mask, affine = _above(_store(), x), _affine(3, 5)
    blocks = (x.numel() // 512, -(-x.numel() // 256))
    part = x[256 * blocks[0] :]
    return {
        "decoded": digest(_decoded(code.decode, x)),
        "served": digest(_decoded(lambda out: code.decode(out, affine, mask, True), x)),
        "blocks": digest(_decoded(lambda out: code.decode(out, blocks=blocks), part)),
    }


def _odd_values() -> Iterator[tuple[str, Record]]:
    """Constants, zeros, an outlier, and what is not finite."""
    make, x = TREE.get("codecs", "ValueCode"), floats(1000)
    odd = {"constant": torch.full_like(x, 0.3), "zeros": torch.zeros_like(x)}
    for name, value in (("outlier", 1e4), ("infinite", math.inf), ("not a number", math.nan)):
        odd[name] = x.clone()
        odd[name][300] = value
    for treatment in _treatments():
        for name, tensor in odd.items():
            store = _store()
            code = make(store, tensor, treatment, KEY)
            found = {"code": digest(store.content()), "decoded": digest(_decoded(code.decode, x))}
            yield f"odd values/{_named(treatment)}/{name}", found


def _channels() -> Iterator[tuple[str, Record]]:
    """An affine of channels before coding, in both memory formats and in ragged sizes."""
    make, image = TREE.get("codecs", "ValueCode"), floats(4032).view(2, 32, 7, 9)
    last = image.to(memory_format=torch.channels_last)
    tensors = (("contiguous", image, 63), ("channels last", last, 1), ("ragged", floats(257), 3))
    for treatment in _treatments():
        for dtype in DTYPES:
            for name, tensor, inner in tensors:
                store, x = _store(), tensor.to(dtype)
                code = make(store, x, treatment, KEY, _affine(32, inner))
                out = _decoded(code.decode, x)
                found = {"code": digest(store.content()), "decoded": digest(out)}
                yield f"channels/{_named(treatment)}/{dtype}/{name}", found


def _masks() -> Iterator[tuple[str, Record]]:
    codes, predicate = element_codes(), TREE.get("kernel_words", "Predicate")
    for dtype in DTYPES:
        for count in SIZES:
            for kind, low, high in ((predicate.ABOVE, 0.0, math.nan), (predicate.INSIDE, 0.0, 6.0)):
                store, x = _store(), floats(count, dtype)
                code = codes.mask(store, x, kind, low, high)
                out = _decoded(lambda out, code=code: codes.read(code, out, -1.5, 2.5), x)
                found = {"code": digest(store.content()), "decoded": digest(out)}
                yield f"mask/{kind.name}/{dtype}/{count}", found


def _intervals() -> Iterator[tuple[str, Record]]:
    codes, fitted = element_codes(), derivative_lines()
    kind = "derivative" if fitted is None else "derivative by lines"
    for bits in range(1, 9):
        borders = torch.linspace(-3.0, 3.0, 2**bits - 1) if fitted is None else fitted(bits)
        levels = torch.linspace(-0.1, 1.1, 2**bits)
        for dtype in DTYPES:
            for count in SIZES:
                store, x = _store(), floats(count, dtype)
                code = codes.intervals(store, x, bits, borders)
                out = _decoded(lambda out, c=code, levels=levels: codes.read(c, out, levels), x)
                found = {"code": digest(store.content()), "decoded": digest(out)}
                yield f"{kind}/{bits}/{dtype}/{count}", found


def _integers() -> Iterator[tuple[str, Record]]:
    codes = element_codes()
    widths = {
        torch.int8: (1, 3, 8),
        torch.int16: (5, 12),
        torch.int32: (1, 17),
        torch.int64: (9, 33),
    }
    for dtype, all_bits in widths.items():
        for bits in all_bits:
            for count in SIZES:
                base = -(2 ** (bits - 1))
                generator = torch.Generator().manual_seed(count)
                x = torch.randint(base, base + 2**bits, (count,), generator=generator).to(dtype)
                store = _store()
                code = codes.integers(store, x, bits, base)
                out = _decoded(lambda out, code=code: codes.read(code, out), x)
                found = {"code": digest(store.content()), "decoded": digest(out)}
                yield f"integers/{bits}/{dtype}/{count}", found


def _steps() -> Iterator[tuple[str, Record]]:
    """Codes in steps of the tensor's own range, or of each of five channels'."""
    codes, grid_of = element_codes(), TREE.get("ranged", "grid_of")
    for bits in range(1, 9):
        for dtype in DTYPES:
            for count in SIZES:
                x, store = floats(count, dtype), _store()
                low, high = (-8.0 - torch.arange(5.0), 9.0 + torch.arange(5.0))
                grid = grid_of(low, high, bits, 3)
                code = codes.steps(store, x, bits, KEY, grid.to_steps)
                out = _decoded(lambda out, c=code, g=grid: codes.read(c, out, g.from_steps), x)
                found = {"code": digest(store.content()), "decoded": digest(out)}
                yield f"steps/{bits}/{dtype}/{count}", found


def _averages() -> Iterator[tuple[str, Record]]:
    make = TREE.get("averaged", "AveragedCode")
    for treatment in _treatments():
        for group in (2, 4):
            store, x = _store(), floats(4097)
            code = make(store, x, group, treatment, KEY)
            found = {"code": digest(store.content()), "decoded": digest(_decoded(code.decode, x))}
            yield f"averages/{_named(treatment)}/groups of {group}", found


def _evictions() -> Iterator[tuple[str, Record]]:
    """What the pool's small pages hold, before and after planes went."""
    make, paged = TREE.get("codecs", "ValueCode"), TREE.get("paged", "PagedStore")
    for treatment in _treatments():
        store, x, found = paged(None, page_bytes=64), floats(4097), {}
        code = make(store, x, treatment, KEY)
        for place in range(3):
            found[f"{place}"] = [code.nbytes, store.evicted_bytes, *_read(code, x).values()]
            store.evict(300)
        yield f"evictions/{_named(treatment)}", found


# --- normalisations ---------------------------------------------------------------------------


def _channel_norms() -> Iterator[tuple[str, Record]]:
    image = floats(8064).view(4, 32, 7, 9)
    last = image.to(memory_format=torch.channels_last)
    for layout, x, inner in (("contiguous", image, 63), ("channels last", last, 1)):
        for masked in (False, True):
            yield f"channel norm/{layout}/kept/masked {masked}", _channel_norm(x, inner, masked)
            for treatment in _treatments():
                name = f"channel norm/{layout}/{_named(treatment)}/masked {masked}"
                yield name, _channel_norm(x, inner, masked, treatment)


def _channel_norm(x: Tensor, inner: int, masked: bool, treatment: Any = None) -> Record:
    """Statistics, forward with a residual added, and both passes of backward."""
    passes, store = norms(), _store()
    geometry = passes.Geometry(32, inner, x.numel())
    running = (floats(32, seed=1).clone(), floats(32, seed=2).abs(), 0.1)
    moving = passes.RunningStatistics(*running)
    statistics = passes.take_statistics(x, geometry, 1e-5, moving)
    forward, result, out = statistics.forward(inner), _affine(32, inner), torch.full_like(x, 3)
    mask = element_codes().unwritten_mask(store, x.numel()) if masked else None
    addend, most = 0.5 * x, 6.0 if masked else math.inf
    output = passes.NormOutput(out, result, addend, mask, most)
    values = _forwarded(passes, store, x, forward, output, treatment)
    if mask is not None:
        mask.planes.seal()
    flat = torch.as_strided(x, (x.numel(),), (1,))
    computed = passes.ComputedValues(lambda: x, x.numel(), forward)
    found = {"statistics": digest(*statistics, *moving), "result": digest(out)}
    found |= {"code": digest(store.content()), "computed": list(_read(computed, flat).values())}
    return found | _channel_gradients(passes, values, mask, x, geometry, statistics, result)


def _forwarded(
    passes: Any, store: Any, x: Tensor, forward: Any, output: Any, treatment: Any
) -> Any:
    if treatment is not None:
        return passes.coded(store, x, treatment, KEY, forward, output=output)
    passes.emit(x, forward, output)
    return passes.KeptValues(x, forward)


def _channel_gradients(
    passes: Any, values: Any, mask: Any, x: Tensor, geometry: Any, statistics: Any, result: Any
) -> Record:
    gradient, of_gamma, of_beta = x.sin(), torch.zeros(32), torch.zeros(32)
    masked, of_x = torch.full_like(x, 3), torch.full_like(x, 3)
    sums = passes.sum_gradient(values, gradient, mask, masked, geometry)
    deviation, written = statistics.inverse_deviation, (of_gamma, of_beta)
    factors = passes.gradient_factors(sums, geometry, deviation, result.scale, written)
    passes.write_input_gradient(values, gradient, mask, of_x, factors)
    parts = {"sums": sums, "masked": (masked,), "of parameters": written, "of input": (of_x,)}
    return {name: digest(*tensors) for name, tensors in parts.items()}


def _row_norms() -> Iterator[tuple[str, Record]]:
    for rows, length in ((1, 5), (7, 257), (33, 768)):
        for centred in (False, True):
            x, name = floats(rows * length).view(rows, length), f"{rows} rows of {length}"
            name = f"row norm/{name}/centred {centred}"
            yield f"{name}/kept", _row_norm(x, centred)
            for treatment in _treatments():
                yield f"{name}/{_named(treatment)}", _row_norm(x, centred, treatment)


def _row_norm(x: Tensor, centred: bool, treatment: Any = None) -> Record:
    """Forward, and backward with and without gamma and sums."""
    passes, store, length = norms(), _store(), x.shape[1]
    moments = TREE.get("kernel_words", "RowMoments")(1e-5, centred)
    affine, result, out = passes.unmeasured(x, length), _affine(length, 1), torch.full_like(x, 3)
    output, values = passes.NormOutput(out, result, None, None), passes.KeptRows(x, affine)
    if treatment is None:
        passes.emit(x, affine, output, moments)
    else:
        values = passes.coded(store, x, treatment, KEY, affine, output=output, rows=moments)
    found = {"code": digest(store.content()), "result": digest(out, affine.scale, affine.shift)}
    for gamma in (result.scale, None):
        of_x, scale, summing = torch.full_like(x, 3), affine.scale, gamma is not None
        job = passes.RowBackward(length, centred, x.sin(), of_x, gamma, scale, summing)
        sums = passes.backward_rows(values, job)
        found[f"gradients, gamma {summing}"] = digest(of_x, *(sums or ()))
    return found


# --- reductions -------------------------------------------------------------------------------


def _cuts(count: int) -> Iterator[tuple[int, int]]:
    yield from ((1, 1), *(((3, 1), (5, 7)) if count > 1 else ()))


def _ranges() -> Iterator[tuple[str, Record]]:
    measure, strategies = range_measure(), TREE.get("kernel_words", "RangeStrategy")
    for dtype in DTYPES:
        for count in SIZES:
            for cut in _cuts(count):
                x, found = floats(count, dtype), {}
                for strategy in (*strategies, None):
                    ends = torch.full((2, cut[0]), 3.0)
                    measure(x, ends, cut, strategy)
                    found[strategy.name if strategy is not None else "by rule"] = digest(ends)
                yield f"ranges/{dtype}/{count}/{cut}", found


def _sums() -> Iterator[tuple[str, Record]]:
    module = TREE.module("reductions")
    if not hasattr(module, "measure_sums"):
        return  # a part of each job that takes them: see the norms' statistics
    places = TREE.get("kernel_words", "ChannelSums")
    kind_of = TREE.get("codecs", "element_type")
    for dtype in DTYPES:
        for count in SIZES:
            for cut in _cuts(count):
                x, both = floats(count, dtype), torch.full((2, cut[0]), 3.0, dtype=torch.float64)
                room = torch.empty(
                    max(1, module.sums_workspace_bytes(count, 1, *cut)), dtype=torch.uint8
                )
                where = places(*cut, *(each.data_ptr() for each in (*both, room)))
                module.measure_sums(x.data_ptr(), kind_of(dtype), count, where, 1)
                yield f"sums/{dtype}/{count}/{cut}", {"sums": digest(both)}
