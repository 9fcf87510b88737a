"""What the codecs do in passing, against the oracle's separate steps: views, sums, block ranges."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daf.core.code_format import ElementType, Predicate, block_count, words_per_plane
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, ChannelSums, StridedView
from daf.kernels.cpu import flat, reductions
from daf.kernels.cpu.strided_views import in_memory_order, merged
from daf.kernels.reference import codecs as reference
from daf.kernels.reference import reductions as reference_reductions

KEY = 0x0FEDCBA987654321
F32 = ElementType.FLOAT32
TYPES = tuple(ElementType)
INPUTS = ("smooth", "wild", "mixed", "broken")
CODECS = ("rotated", "minmax")
BITS = {"rotated": 3, "minmax": 5}


class Strided(NamedTuple):
    """A view of the elements of a storage, from number ``first`` on."""

    first: int
    view: StridedView


def strided(first: int, *dimensions: tuple[int, int]) -> Strided:
    sizes, strides = zip(*dimensions, strict=True)
    return Strided(first, StridedView(sizes, strides))


# All within 12,000 elements: (size, stride) of each dimension.
VIEWS = {
    "dense": strided(5, (5000, 1)),
    "scalar": strided(7, (1, 99)),
    "rows": strided(3, (40, 200), (100, 1)),
    "long rows": strided(0, (3, 3000), (2000, 1)),
    "columns": strided(1, (3, 1), (1000, 7)),
    "transposed": strided(0, (90, 1), (70, 90)),
    "backwards": strided(9999, (3000, -3)),
    "broadcast": strided(100, (20, 0), (33, 1)),
    "each twice": strided(100, (300, 5), (2, 0)),
    "six": strided(8, (2, 5000), (3, 1500), (4, 300), (3, 90), (5, 15), (7, 2)),
    "pooled": strided(50, (2, 4000), (3, 1000), (7, 90), (5, 9), (3, 3)),
}


def native_affine(affine: reference.Affine | None) -> ChannelAffine | None:
    if affine is None:
        return None
    at = (affine.scale.ctypes.data, affine.shift.ctypes.data)
    return ChannelAffine(len(affine.scale), affine.inner, *at)


class Coded:
    """Guarded room for a code, and the calls that fill and read it."""

    def __init__(self, cases, codec: str, count: int, element_type=F32, threads: int = 1) -> None:
        self.cases, self.codec, self.count = cases, codec, count
        self.element_type, self.threads, self.bits = element_type, threads, BITS[codec]
        self.words, self.blocks = words_per_plane(count), block_count(count)
        self._planes = cases.guarded(self.bits * self.words, np.uint32)
        self._headers = cases.guarded(2 * self.blocks, np.uint16)

    def _settings(self, decoding: bool) -> tuple[int, ...]:
        if self.codec == "minmax":
            return (self.bits,) if decoding else (self.bits, KEY)
        return (self.bits, self.bits, 2, KEY) if decoding else (self.bits, 2, KEY)

    def encode(self, address: int, **options: Any) -> Coded:
        options["affine"] = native_affine(options.get("affine"))
        getattr(flat, f"encode_{self.codec}")(
            *(address, self.element_type, self.count, *self._settings(decoding=False)),
            *(self._planes.address, self._headers.address, self.threads),
            **options,
        )
        return self

    def decode(self, address: int, **options: Any) -> None:
        options["affine"] = native_affine(options.get("affine"))
        getattr(flat, f"decode_{self.codec}")(
            *(self._planes.address, self._headers.address, self.count),
            *(*self._settings(decoding=True), address, self.element_type, self.threads),
            **options,
        )

    @property
    def code(self) -> reference.Code:
        planes = self._planes.opened().reshape(self.bits, -1)
        return reference.Code(planes, self._headers.opened().reshape(-1, 2))

    def fill(self, code: reference.Code) -> Coded:
        self._planes.fill(code.planes)
        self._headers.fill(code.headers)
        return self


def oracle_code(codec: str, source: np.ndarray, affine=None) -> reference.Code:
    if codec == "rotated":
        return reference.encode_rotated(source, BITS[codec], 2, KEY, affine)
    return reference.encode_minmax(source, BITS[codec], KEY, affine)


def oracle_values(codec: str, code: reference.Code, target, affine=None) -> np.ndarray:
    if codec == "rotated":
        return reference.decode_rotated(code, target, BITS[codec], 2, KEY, affine)
    return reference.decode_minmax(code, target, BITS[codec], affine)


def same_bytes(found, expected) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def same_code(found: reference.Code, expected: reference.Code) -> None:
    same_bytes(found.headers, expected.headers)
    same_bytes(found.planes, expected.planes)


def make_affine(cases, channels: int, inner: int) -> reference.Affine:
    return reference.Affine(cases.gaussian(channels, 5), cases.gaussian(channels, 6), inner)


def address_of(storage: np.ndarray, first: int) -> int:
    return storage.ctypes.data + first * storage.itemsize


# --- views ----------------------------------------------------------------------------------


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_in_the_order_of_their_sizes(
    cases, on_every_set, name, codec, element_type
) -> None:
    first, view = VIEWS[name]
    for kind in INPUTS:
        storage = cases.as_type(getattr(cases, kind)(12_000), element_type)
        source = reference_reductions.elements_of(storage, first, view)
        expected = oracle_code(codec, source)

        def check(storage=storage, source=source, expected=expected) -> None:
            coded = Coded(cases, codec, len(source), element_type)
            coded.encode(address_of(storage, first), view=view)
            same_code(coded.code, expected)

        on_every_set(check)


@pytest.mark.parametrize("codec", CODECS)
def test_a_view_with_an_affine(cases, instruction_set, codec) -> None:
    storage, affine = cases.mixed(12_000), make_affine(cases, 7, 3)
    for first, view in VIEWS.values():
        source = reference_reductions.elements_of(storage, first, view)
        coded = Coded(cases, codec, len(source))
        coded.encode(address_of(storage, first), view=view, affine=affine)
        same_code(coded.code, oracle_code(codec, source, affine))


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    strides=st.lists(st.integers(-40, 40), min_size=6, max_size=6),
)
def test_any_view(cases, sizes, strides) -> None:
    view = StridedView(tuple(sizes), tuple(strides[: len(sizes)]))
    storage, first = cases.smooth(5000), 2500
    source = reference_reductions.elements_of(storage, first, view)
    for name in flat.instruction_sets():
        with flat.use_instruction_set(name):
            coded = Coded(cases, "minmax", len(source))
            coded.encode(address_of(storage, first), view=view)
            same_code(coded.code, oracle_code("minmax", source))


def test_many_threads_read_one_view(cases, instruction_set) -> None:
    storage = cases.smooth(600_000)
    view = StridedView((550, 999), (1000, 1))
    source = reference_reductions.elements_of(storage, 0, view)
    expected = oracle_code("rotated", source)
    for threads in (1, 2, 3, 4):
        coded = Coded(cases, "rotated", len(source), threads=threads)
        same_code(coded.encode(storage.ctypes.data, view=view).code, expected)


def test_memory_order_of_a_permuted_tensor_is_its_storage(cases) -> None:
    storage = cases.smooth(2 * 3 * 5 * 7)
    channels_last = storage.reshape(2, 5, 7, 3).transpose(0, 3, 1, 2)
    strides = tuple(stride // 4 for stride in channels_last.strides)
    view = in_memory_order(channels_last.shape, strides)
    assert merged(view) == StridedView((210,), (1,))
    same_bytes(reference_reductions.elements_of(storage, 0, view), storage)


def test_merging_leaves_no_dimension_that_could_go() -> None:
    assert merged(StridedView((2, 1, 3, 4), (12, 99, 4, 1))) == StridedView((24,), (1,))
    assert merged(StridedView((2, 3, 4), (13, 4, 1))) == StridedView((2, 12), (13, 1))
    assert merged(StridedView((5, 6), (0, 0))) == StridedView((30,), (0,))
    assert merged(StridedView((1, 1), (3, 4))) == StridedView((1,), (1,))


# --- sums in passing ------------------------------------------------------------------------


class Summed:
    """Guarded room for the sums of an encoder, and what they should be."""

    def __init__(self, cases, count: int, channels: int, inner: int, threads: int = 1) -> None:
        self.geometry = (channels, inner)
        size = reductions.sums_workspace_bytes(count, threads, channels, inner)
        self._sums = cases.guarded(channels, np.float64)
        self._squares = cases.guarded(channels, np.float64)
        self._workspace = cases.guarded(size, np.uint8)
        at = (self._sums.address, self._squares.address, self._workspace.address)
        self.where = ChannelSums(channels, inner, *at)

    def same_as_oracle(self, source: np.ndarray) -> None:
        self.same_as(reference_reductions.measure_sums(source, *self.geometry))

    def same_as(self, expected: reference_reductions.Sums) -> None:
        same_bytes(self._sums.opened(), expected.sums)
        same_bytes(self._squares.opened(), expected.squares)
        self._workspace.opened()


SUM_GEOMETRIES = ((1, 1), (96, 1), (7, 1), (5, 49), (64, 300), (2, 5000))


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("geometry", SUM_GEOMETRIES)
def test_sums_in_passing_are_those_of_the_reduction(
    cases, on_every_set, geometry, codec, element_type
) -> None:
    for kind, count in zip(INPUTS, (20_000, 4097, 255, 10_240), strict=True):
        source = cases.as_type(getattr(cases, kind)(count), element_type)
        code, sums = (
            oracle_code(codec, source),
            reference_reductions.measure_sums(source, *geometry),
        )

        def check(source=source, code=code, sums=sums) -> None:
            coded = Coded(cases, codec, len(source), element_type)
            summed = Summed(cases, len(source), *geometry)
            coded.encode(source.ctypes.data, sums=summed.where)
            same_code(coded.code, code)
            summed.same_as(sums)

        on_every_set(check)


@pytest.mark.parametrize("codec", CODECS)
def test_sums_are_of_what_is_coded(cases, instruction_set, codec) -> None:
    """After the affine, and of a view in its order."""
    storage, affine = cases.mixed(12_000), make_affine(cases, 16, 1)
    first, view = VIEWS["six"]
    source = reference_reductions.elements_of(storage, first, view)
    coded, summed = Coded(cases, codec, len(source)), Summed(cases, len(source), 5, 14)
    address = address_of(storage, first)
    coded.encode(address, view=view, affine=affine, sums=summed.where)
    same_code(coded.code, oracle_code(codec, source, affine))
    summed.same_as_oracle(affine.apply(source.reshape(1, -1), 0).reshape(-1))


@pytest.mark.parametrize("geometry", SUM_GEOMETRIES)
def test_sums_in_passing_do_not_depend_on_threads(cases, instruction_set, geometry) -> None:
    source = cases.smooth(4 * 256 * 256 + 99)
    expected = oracle_code("minmax", source)
    for threads in (1, 2, 3, 4):
        coded = Coded(cases, "minmax", len(source), threads=threads)
        summed = Summed(cases, len(source), *geometry, threads)
        coded.encode(source.ctypes.data, sums=summed.where)
        same_code(coded.code, expected)
        summed.same_as_oracle(source)


def test_sums_of_nothing(cases, instruction_set) -> None:
    for codec in CODECS:
        summed = Summed(cases, 0, 3, 1)
        Coded(cases, codec, 0).encode(0, sums=summed.where)
        summed.same_as_oracle(np.zeros(0, np.float32))


# --- ranges of blocks -----------------------------------------------------------------------

CUTS = (0, 1, 3, 10, 11, 17, 20)
CUT_COUNT = 19 * 256 + 100


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_blocks_coded_one_part_at_a_time(cases, instruction_set, codec, element_type) -> None:
    affine = make_affine(cases, 7, 49)
    source = cases.as_type(cases.mixed(CUT_COUNT), element_type)
    for after in (None, affine):
        coded = Coded(cases, codec, CUT_COUNT, element_type)
        for first, last in reversed([*pairwise(CUTS)]):
            part = source[256 * first : 256 * last].copy()
            coded.encode(part.ctypes.data, affine=after, blocks=(first, last))
        same_code(coded.code, oracle_code(codec, source, after))


@pytest.mark.parametrize("codec", CODECS)
def test_other_blocks_are_left_alone(cases, instruction_set, codec) -> None:
    source = cases.smooth(CUT_COUNT)
    coded, before = Coded(cases, codec, CUT_COUNT), Coded(cases, codec, CUT_COUNT).code
    coded.encode(source[256 * 3 :].ctypes.data, blocks=(3, 10))
    whole, found = oracle_code(codec, source), coded.code
    chosen = (np.arange(20) >= 3) & (np.arange(20) < 10)
    same_bytes(found.headers, np.where(chosen[:, None], whole.headers, before.headers))
    same_bytes(found.planes, np.where(chosen.repeat(8), whole.planes, before.planes))


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_of_a_view(cases, instruction_set, codec) -> None:
    """The view is the whole tensor's, whichever blocks are asked for."""
    storage = cases.smooth(12_000)
    for name in ("dense", "rows", "long rows"):
        first, view = VIEWS[name]
        source = reference_reductions.elements_of(storage, first, view)
        coded, blocks = Coded(cases, codec, len(source)), block_count(len(source))
        for part in ((0, 2), (2, 5), (5, blocks)):
            coded.encode(address_of(storage, first), view=view, blocks=part)
        same_code(coded.code, oracle_code(codec, source))


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_blocks_are_decoded_into_and_onto_an_existing_buffer(
    cases, instruction_set, codec, element_type
) -> None:
    source = cases.as_type(cases.broken(CUT_COUNT), element_type)
    code, affine = oracle_code(codec, source), make_affine(cases, 7, 49)
    coded = Coded(cases, codec, CUT_COUNT, element_type).fill(code)
    mask = reference.encode_mask(source, Predicate.ABOVE, 0.0, 0.0)
    old = cases.as_type(cases.smooth(CUT_COUNT, 9), element_type)
    for onto in (None, old):
        for chosen in (None, mask):
            for after in (None, affine):
                target = reference.Target(CUT_COUNT, element_type, onto, chosen)
                whole = oracle_values(codec, code, target, after)
                for first, last in pairwise(CUTS):
                    part = slice(256 * first, 256 * last)
                    room = cases.guarded(len(whole[part]), whole.dtype).fill(old[part])
                    coded.decode(
                        room.address,
                        affine=after,
                        mask=0 if chosen is None else mask.ctypes.data,
                        accumulate=onto is not None,
                        blocks=(first, last),
                    )
                    same_bytes(room.opened(), whole[part])


def test_parts_of_a_large_tensor_on_many_threads(cases, instruction_set) -> None:
    """Large enough for more than one thread, and for results that bypass the caches."""
    source, blocks = cases.smooth(3_000_000), block_count(3_000_000)
    for codec in CODECS:
        code = oracle_code(codec, source)
        whole = oracle_values(codec, code, reference.Target(len(source)))
        for threads in (1, 4):
            coded = Coded(cases, codec, len(source), threads=threads)
            for first, last in ((0, 777), (777, blocks)):
                coded.encode(source[256 * first :].ctypes.data, blocks=(first, last))
            same_code(coded.code, code)
            back = np.full(len(source) - 777 * 256, 7, np.float32)
            coded.decode(back.ctypes.data, blocks=(777, blocks))
            same_bytes(back, whole[777 * 256 :])


@pytest.mark.parametrize("codec", CODECS)
def test_no_blocks_are_no_work(cases, instruction_set, codec) -> None:
    coded, source = Coded(cases, codec, CUT_COUNT), np.zeros(1, np.float32)
    before = coded.code
    coded.encode(source.ctypes.data, blocks=(20, 20))
    same_code(coded.code, before)
    coded.decode(source.ctypes.data, blocks=(5, 5))
    assert source[0] == 0


# --- the contract ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "view",
    [
        StridedView((255,), (1,)),
        StridedView((16, 16), (1,)),
        StridedView((-16, -16), (1, 1)),
        StridedView((256,), (2**62,)),
        StridedView((2,) * 7 + (2,), (7, 11, 5, 9, 3, 2, 8, 6)),
    ],
)
def test_bad_views_are_refused(cases, codec, view) -> None:
    with pytest.raises(KernelError, match="asked for"):
        Coded(cases, codec, 256).encode(np.zeros(256, np.float32).ctypes.data, view=view)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("blocks", [(-1, 1), (1, 0), (0, 3), (3, 3)])
def test_bad_block_ranges_are_refused(cases, codec, blocks) -> None:
    room, coded = np.zeros(512, np.float32), Coded(cases, codec, 512)
    for call in (coded.encode, coded.decode):
        with pytest.raises(KernelError, match="the tensor has 2"):
            call(room.ctypes.data, blocks=blocks)


@pytest.mark.parametrize("codec", CODECS)
def test_bad_sums_are_refused(cases, codec) -> None:
    room, good = np.zeros(512, np.float32), Summed(cases, 512, 2, 3).where
    for field in good._fields:
        bad = good._replace(**{field: 0})
        with pytest.raises(KernelError, match="asked for"):
            Coded(cases, codec, 512).encode(room.ctypes.data, sums=bad)
    with pytest.raises(KernelError, match="whole tensors"):
        Coded(cases, codec, 512).encode(room.ctypes.data, sums=good, blocks=(0, 1))
