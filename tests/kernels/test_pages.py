"""Kernels over pages: the oracle's bytes, and after evictions what the oracle reads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import native_calls
import numpy as np
import pytest
from daf_bench.pool.plane_addresses import Pages
from native_calls import affine_of
from reference import codecs as reference
from thoroughness import pairs

from daf.core.code_format import ElementType, Predicate, block_count, words_per_plane
from daf.core.errors import KernelError
from daf.kernels import PageFields
from daf.kernels.cpu.instruction_sets import instruction_sets, use_instruction_set
from daf.pool.paged_pool import PagedStore, PlaneTensor
from daf.pool.views import PlaneView

KEY = 0xFEDCBA9876543210
F32 = ElementType.FLOAT32
PAGE_SIZES = (32, 512, 4096)
COUNTS = (1, 255, 256, 257, 4096, 5000, 70_001)
GUARD = 64


@pytest.fixture(params=instruction_sets(), autouse=True)
def instruction_set(request) -> Iterator[str]:
    with use_instruction_set(request.param):
        yield request.param


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def words_at(place: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(place))


def runs_of(view: PlaneView) -> Iterator[tuple[int, int, int]]:
    """(run, first block, blocks)"""
    blocks, whole = block_count(view.fields.elements), Pages(view).run_elements // 256
    for run in range(Pages(view).runs):
        yield run, run * whole, min(whole, blocks - run * whole)


def gathered(view: PlaneView) -> np.ndarray:
    """(bits, words): every plane, its runs put together."""
    planes = np.zeros((view.fields.bits, words_per_plane(view.fields.elements)), np.uint32)
    for run, first, blocks in runs_of(view):
        for plane, place in enumerate(Pages(view).planes(run)):
            planes[plane, 8 * first : 8 * (first + blocks)] = words_at(place, 8 * blocks)
    return planes


def gathered_headers(view: PlaneView) -> np.ndarray:
    headers = np.zeros((block_count(view.fields.elements), 2), np.uint16)
    for run, first, blocks in runs_of(view):
        ctypes.memmove(headers[first:].ctypes.data, Pages(view).headers(run), 4 * blocks)
    return headers


def guarded(count: int, dtype, fill: np.ndarray | None = None) -> np.ndarray:
    """Memory for ``count`` elements, full of rubbish, and 64 bytes behind them."""
    memory = np.full(count * np.dtype(dtype).itemsize + GUARD, 0xA5, np.uint8)
    if fill is not None:
        memory[:-GUARD] = fill.view(np.uint8)
    return memory


def opened(memory: np.ndarray, dtype) -> np.ndarray:
    assert (memory[-GUARD:] == 0xA5).all(), "wrote beyond the end"
    return memory[:-GUARD].view(dtype)


def same_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.tobytes() == expected.tobytes()


def pool(page_bytes: int) -> PagedStore:
    return PagedStore(page_bytes=page_bytes, poison=True)


def room(page_bytes: int, count: int, bits: int, *, headers: bool = True) -> PlaneTensor:
    """An open tensor, other tensors between whose pages its own lie."""
    store = pool(page_bytes)
    others = [store.allocate_planes(count, 3) for _ in range(3)]
    del others[1]
    return store.allocate_planes(count, bits, minimum_bits=1, headers=headers)


# --- with nothing given up --------------------------------------------------------------------


@pytest.mark.parametrize(("page_bytes", "element_type"), pairs(PAGE_SIZES, tuple(ElementType)))
def test_rotated_pages_hold_the_oracle_s_bytes(cases, page_bytes, element_type) -> None:
    for count in COUNTS:
        source = cases.as_type(cases.broken(count, count), element_type)
        bits = 1 + count % 4
        tensor = room(page_bytes, count, bits)
        fields = tensor.view.fields
        native_calls.encode_rotated(address(source), element_type, fields, KEY, 1)
        expected = reference.encode_rotated(source, bits, KEY)
        same_bytes(gathered(tensor.view), expected.planes)
        same_bytes(gathered_headers(tensor.view), expected.headers)
        back = guarded(count, source.dtype)
        native_calls.decode_rotated(fields, KEY, address(back), element_type, 1)
        target = reference.Target(count, element_type)
        decoded = reference.decode_rotated(expected, target, bits, KEY)
        same_bytes(opened(back, source.dtype), decoded)


@pytest.mark.parametrize(("page_bytes", "bits"), pairs(PAGE_SIZES, [1, 3, 8]))
def test_minmax_pages_hold_the_oracle_s_bytes(cases, page_bytes, bits) -> None:
    for count in COUNTS:
        source = cases.mixed(count, count)
        tensor = room(page_bytes, count, bits)
        native_calls.encode_minmax(address(source), F32, tensor.view.fields, KEY, 1)
        expected = reference.encode_minmax(source, bits, KEY)
        same_bytes(gathered(tensor.view), expected.planes)
        same_bytes(gathered_headers(tensor.view), expected.headers)
        back = guarded(count, np.float32)
        native_calls.decode_minmax(tensor.view.fields, address(back), F32, 1)
        decoded = reference.decode_minmax(expected, reference.Target(count), bits)
        same_bytes(opened(back, np.float32), decoded)


@pytest.mark.parametrize(("page_bytes", "bits"), pairs(PAGE_SIZES, [1, 3, 8]))
def test_pages_of_steps_hold_the_oracle_s_bytes(cases, page_bytes, bits) -> None:
    affine = reference.Affine(cases.gaussian(3, 5), cases.gaussian(3, 6), 7)
    for count in COUNTS:
        source = cases.mixed(count, count)
        fields = (tensor := room(page_bytes, count, bits, headers=False)).view.fields
        native_calls.encode_steps(address(source), F32, fields, KEY, 1, affine_of(affine))
        expected = reference.encode_steps(source, bits, KEY, affine)
        same_bytes(gathered(tensor.view), expected)
        back = guarded(count, np.float32)
        native_calls.decode_steps(fields, address(back), F32, 1, affine_of(affine))
        decoded = reference.decode_steps(expected, reference.Target(count), affine)
        same_bytes(opened(back, np.float32), decoded)


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
def test_mask_pages_hold_the_oracle_s_bytes(cases, page_bytes) -> None:
    for count in COUNTS:
        source = cases.wild(count, count)
        fields = (tensor := room(page_bytes, count, 1, headers=False)).view.fields
        native_calls.encode_mask(address(source), F32, fields, Predicate.INSIDE, 0.0, 6.0, 1)
        expected = reference.encode_mask(source, Predicate.INSIDE, 0.0, 6.0)
        same_bytes(gathered(tensor.view), expected)
        back = guarded(count, np.float32)
        native_calls.decode_mask(fields, -0.5, 2.0, address(back), F32, 1)
        same_bytes(opened(back, np.float32), reference.decode_mask(expected, count, -0.5, 2.0, F32))


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
def test_derivative_pages_hold_the_oracle_s_bytes(cases, page_bytes) -> None:
    lines, levels = cases.lines(1, 3), cases.gaussian(8, 2)
    for count in COUNTS:
        source = cases.gaussian(count, count)
        fields = (tensor := room(page_bytes, count, 3, headers=False)).view.fields
        assert native_calls.encode_derivative(address(source), F32, fields, address(lines), KEY, 1)
        expected = reference.encode_derivative(source, 3, KEY, lines)
        same_bytes(gathered(tensor.view), expected)
        back = guarded(count, np.float32)
        native_calls.decode_derivative(fields, address(levels), address(back), F32, 1)
        decoded = reference.decode_derivative(expected, count, levels, F32)
        same_bytes(opened(back, np.float32), decoded)
        source[-1] = np.inf
        at = (address(source), F32, fields, address(lines))
        assert not native_calls.encode_derivative(*at, KEY, 1)


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
@pytest.mark.parametrize(("bits", "dtype"), [(5, np.int16), (33, np.int64), (64, np.int64)])
def test_integer_pages_hold_the_oracle_s_bytes(page_bytes, bits, dtype) -> None:
    random, base = np.random.default_rng(bits), -(2 ** (bits - 1))
    for count in COUNTS:
        source = random.integers(base, -base - 1, count, dtype, endpoint=True)
        item = source.itemsize
        fields = (tensor := room(page_bytes, count, bits, headers=False)).view.fields
        native_calls.encode_integers(address(source), item, fields, base, 1)
        same_bytes(gathered(tensor.view), reference.encode_integers(source, bits, base))
        back = guarded(count, dtype)
        native_calls.decode_integers(fields, base, address(back), item, 1)
        same_bytes(opened(back, dtype), source)


def test_integers_that_do_not_fit_are_refused() -> None:
    source = np.array([0] * 999 + [8], np.int32)
    fields = (tensor := room(32, 1000, 3, headers=False)).view.fields
    with pytest.raises(KernelError, match="more bits"):
        native_calls.encode_integers(address(source), 4, fields, 0, 1)
    assert tensor.nbytes > 0


def test_nothing_happens_to_an_empty_tensor() -> None:
    fields = (tensor := room(512, 0, 2)).view.fields
    native_calls.encode_rotated(0, F32, fields, KEY, 1)
    native_calls.decode_rotated(fields, KEY, 0, F32, 2)
    assert tensor.nbytes == 0


# --- with planes gone -------------------------------------------------------------------------


def coded(source: np.ndarray, bits: int, page_bytes: int, evicted: float):
    """A sealed tensor in a pool of its own that lost a share of what it may lose, and its code."""
    store = pool(page_bytes)
    tensor = store.allocate_planes(len(source), bits, minimum_bits=1)
    native_calls.encode_rotated(address(source), F32, tensor.view.fields, KEY, 1)
    tensor.seal()
    spare = store.statistics().evictable_pages
    assert store.evict(int(evicted * spare) * page_bytes).pages == int(evicted * spare)
    return tensor, reference.encode_rotated(source, bits, KEY)


def decoded_by_oracle(
    code: reference.Code, view: PlaneView, target: reference.Target, affine=None
) -> np.ndarray:
    """Every run from as many planes as it has left."""
    bits = view.fields.bits
    by_width = {
        kept: reference.decode_rotated(
            reference.Code(code.planes[:kept], code.headers), target, bits, KEY, affine
        )
        for kept in {Pages(view).kept_bits(run) for run in range(Pages(view).runs)}
    }
    out = next(iter(by_width.values())).copy()
    for run, first, blocks in runs_of(view):
        part = slice(256 * first, min(256 * (first + blocks), target.count))
        out[part] = by_width[Pages(view).kept_bits(run)][part]
    return out


@pytest.mark.parametrize(("page_bytes", "bits"), pairs(PAGE_SIZES, [2, 3, 4]))
def test_runs_of_any_width_decode_as_the_oracle_does(cases, page_bytes, bits) -> None:
    widths = set()
    for step, evicted in enumerate((0.0, 0.13, 0.5, 0.77, 1.0)):
        count = 150_000 + 7777 * step
        source = cases.broken(count, step)
        tensor, code = coded(source, bits, page_bytes, evicted)
        back = guarded(count, np.float32)
        with tensor.pinned() as view:
            native_calls.decode_rotated(view.fields, KEY, address(back), F32, 1)
            expected = decoded_by_oracle(code, view, reference.Target(count))
            widths |= {Pages(view).kept_bits(run) for run in range(Pages(view).runs)}
        same_bytes(opened(back, np.float32), expected)
    assert widths == set(range(1, bits + 1))


@pytest.mark.parametrize("element_type", tuple(ElementType))
def test_what_begins_with_fewer_planes_is_coded_in_those(cases, element_type) -> None:
    """As if all planes had been written and the last ones given up since."""
    count, widths = 150_001, set()
    source = cases.as_type(cases.broken(count), element_type)
    code = reference.encode_rotated(source, 4, KEY)
    for share in (0.4, 0.55, 0.7, 0.97):
        cap = 20_000 + int(share * code.planes.nbytes)
        store = PagedStore(cap, page_bytes=512, poison=True)
        tensor = store.allocate_planes(count, 4, minimum_bits=1)
        native_calls.encode_rotated(address(source), element_type, tensor.view.fields, KEY, 2)
        same_bytes(gathered_headers(tensor.view), code.headers)
        for run, first, blocks in runs_of(tensor.view):
            widths.add(Pages(tensor.view).kept_bits(run))
            for plane, place in enumerate(Pages(tensor.view).planes(run)):
                expected = code.planes[plane, 8 * first : 8 * (first + blocks)]
                same_bytes(words_at(place, 8 * blocks), expected)
        back = guarded(count, np.float32)
        native_calls.decode_rotated(tensor.view.fields, KEY, address(back), F32, 2)
        target = reference.Target(count)
        same_bytes(opened(back, np.float32), decoded_by_oracle(code, tensor.view, target))
    assert widths == {1, 2, 3, 4}


@pytest.mark.parametrize("element_type", tuple(ElementType))
@pytest.mark.parametrize("mask_page_bytes", [128, 512])
def test_options_compose_over_runs_of_different_width(cases, element_type, mask_page_bytes) -> None:
    count, channels = 33_333, 7
    source = cases.smooth(count)
    onto = cases.as_type(cases.mixed(count, 2), element_type)
    affine = reference.Affine(cases.gaussian(channels, 5), cases.gaussian(channels, 6), 49)
    tensor, code = coded(source, 3, 512, 0.6)
    mask = pool(mask_page_bytes).allocate_planes(count, 1, headers=False)
    native_calls.encode_mask(address(source), F32, mask.view.fields, Predicate.ABOVE, 0.1, 0.0, 1)
    words = reference.encode_mask(source, Predicate.ABOVE, 0.1, 0.0)
    target = reference.Target(count, element_type, onto, words)
    back = guarded(count, onto.dtype, onto)
    with tensor.pinned() as view:
        native_calls.decode_rotated(
            *(view.fields, KEY, address(back), element_type, 1),
            affine_of(affine),
            mask.view.fields,
            accumulate=True,
        )
        expected = decoded_by_oracle(code, view, target, affine)
    same_bytes(opened(back, onto.dtype), expected)


def test_minmax_options_compose(cases) -> None:
    count = 33_333
    source, onto = cases.smooth(count), cases.smooth(count, 2)
    affine = reference.Affine(cases.gaussian(64, 5), cases.gaussian(64, 6), 1)
    tensor, mask = room(512, count, 5), room(512, count, 1, headers=False)
    fields = tensor.view.fields
    native_calls.encode_minmax(address(source), F32, fields, KEY, 1, affine_of(affine))
    native_calls.encode_mask(address(source), F32, mask.view.fields, Predicate.ABOVE, 0.1, 0.0, 1)
    back = guarded(count, np.float32, onto)
    native_calls.decode_minmax(
        *(fields, address(back), F32, 1), affine_of(affine), mask.view.fields, accumulate=True
    )
    words = reference.encode_mask(source, Predicate.ABOVE, 0.1, 0.0)
    code = reference.encode_minmax(source, 5, KEY, affine)
    target = reference.Target(count, F32, onto, words)
    same_bytes(opened(back, np.float32), reference.decode_minmax(code, target, 5, affine))


@pytest.mark.parametrize("threads", [2, 3, 100])
def test_bytes_do_not_depend_on_threads(cases, threads) -> None:
    count = 1_000_003
    source, found = cases.smooth(count), []
    for used in (1, threads):
        store = pool(512)
        tensor = store.allocate_planes(count, 3, minimum_bits=1)
        native_calls.encode_rotated(address(source), F32, tensor.view.fields, KEY, used)
        planes, headers = gathered(tensor.view), gathered_headers(tensor.view)
        tensor.seal()
        store.evict(2000 * 300)
        back = guarded(count, np.float32)
        with tensor.pinned() as view:
            native_calls.decode_rotated(view.fields, KEY, address(back), F32, used)
        found.append(planes.tobytes() + headers.tobytes() + opened(back, np.float32).tobytes())
    assert found[0] == found[1]


# --- contract ---------------------------------------------------------------------------------


def test_only_rotated_codes_are_read_without_all_their_planes() -> None:
    store = pool(512)
    source, out = np.zeros(50_000, np.float32), np.zeros(50_000, np.float32)
    tensor = store.allocate_planes(50_000, 2, minimum_bits=1)
    tensor.seal()
    store.evict(512)
    with tensor.pinned() as view:
        native_calls.decode_rotated(view.fields, 0, address(out), F32, 1)
        for call in (
            lambda: native_calls.decode_minmax(view.fields, address(out), F32, 1),
            lambda: native_calls.decode_derivative(
                view.fields, address(source), address(out), F32, 1
            ),
            lambda: native_calls.decode_integers(view.fields, 0, address(out), 4, 1),
        ):
            with pytest.raises(KernelError, match="some of them evicted"):
                call()


def test_calls_outside_the_contract_are_refused() -> None:
    out = np.zeros(1000, np.float32)
    at, fields = address(out), (tensor := room(512, 1000, 2)).view.fields
    other = (longer := room(512, 1001, 1)).view.fields
    nothing_left = PageFields(*fields[:5], full_runs=0, bits=2, kept=1)
    for call in (
        lambda: native_calls.encode_rotated(0, F32, fields, 0, 1),
        lambda: native_calls.encode_rotated(at, F32, fields._replace(bits=5, kept=5), 0, 1),
        lambda: native_calls.encode_rotated(at, F32, fields, 2**64, 1),
        lambda: native_calls.encode_rotated(at, 7, fields, 0, 1),
        lambda: native_calls.encode_rotated(at, F32, fields._replace(table=0), 0, 1),
        lambda: native_calls.decode_rotated(fields, 0, at, F32, 0),
        lambda: native_calls.decode_rotated(nothing_left, 0, at, F32, 1),
        lambda: native_calls.decode_rotated(fields, 0, at, F32, 1, mask=other),
        lambda: native_calls.decode_rotated(fields, 0, at, F32, 1, mask=fields),
        lambda: native_calls.encode_minmax(at, F32, fields, -1, 1),
        lambda: native_calls.encode_steps(at, F32, fields, -1, 1),
        lambda: native_calls.encode_mask(at, F32, fields, Predicate.ABOVE, 0.0, 0.0, 1),
        lambda: native_calls.encode_mask(at, F32, other, 2, 0.0, 0.0, 1),
        lambda: native_calls.decode_derivative(fields, 0, at, F32, 1),
        lambda: native_calls.encode_integers(at, 3, fields, 0, 1),
    ):
        with pytest.raises(KernelError, match="asked"):
            call()
    assert tensor.nbytes > 0
    assert longer.nbytes > 0
