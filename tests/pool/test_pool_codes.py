"""Codes in pages: after evictions the oracle still decodes what is left, without bias."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from daf_bench.pool.plane_addresses import Pages
from numpy.typing import NDArray
from reference.codecs import Code, Target, decode_rotated, encode_rotated

from daf.core.code_tables import rotated_error
from daf.pool.paged_pool import PagedStore, PlaneTensor
from daf.pool.views import PlaneView

BITS = 4
PAGE = 512
RUN = 8 * PAGE
COUNT = 21 * RUN + 1000


def words_at(address: int, count: int) -> NDArray[np.uint32]:
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


def spans(view: PlaneView) -> list[tuple[int, int, int]]:
    """(run, first block, blocks)"""
    blocks, whole = -(-COUNT // 256), Pages(view).run_elements // 256
    return [(r, r * whole, min(whole, blocks - r * whole)) for r in range(Pages(view).runs)]


def write_code(store: PagedStore, code: Code) -> PlaneTensor:
    tensor = store.allocate_planes(COUNT, BITS, minimum_bits=1)
    for run, first, blocks in spans(tensor.view):
        for plane, address in enumerate(Pages(tensor.view).planes(run)):
            source = code.planes[plane, 8 * first : 8 * (first + blocks)]
            words_at(address, 8 * blocks)[:] = source
        headers = np.ascontiguousarray(code.headers[first : first + blocks])
        ctypes.memmove(Pages(tensor.view).headers(run), headers.ctypes.data, headers.nbytes)
    tensor.seal()
    return tensor


def read_code(tensor: PlaneTensor, key: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Decoded values, and how many planes each element still had."""
    with tensor.pinned() as view:
        widths = np.repeat([Pages(view).kept_bits(run) for run in range(Pages(view).runs)], RUN)[
            :COUNT
        ]
        blocks = -(-COUNT // 256)
        planes = np.zeros((BITS, 8 * blocks), np.uint32)
        headers = np.zeros((blocks, 2), np.uint16)
        for run, first, some in spans(view):
            for plane, address in enumerate(Pages(view).planes(run)):
                planes[plane, 8 * first : 8 * (first + some)] = words_at(address, 8 * some)
            ctypes.memmove(headers[first:].ctypes.data, Pages(view).headers(run), 4 * some)
    out = np.zeros(COUNT, np.float32)
    for kept in np.unique(widths):
        code = Code(planes[:kept], headers)
        decoded = decode_rotated(code, Target(COUNT), BITS, key)
        out[widths == kept] = decoded[widths == kept]
    return out, widths


def relative_error(values: NDArray[np.float32], estimate: NDArray[np.float64]) -> float:
    energy = float(np.var(values.astype(np.float64)))
    return float(np.mean((estimate - values) ** 2)) / energy


@pytest.mark.parametrize("evicted_pages", [0, 5, 22, 30, 60, 66])
def test_error_is_that_of_the_planes_left(evicted_pages: int) -> None:
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    store = PagedStore(page_bytes=PAGE, poison=True)
    tensor = write_code(store, encode_rotated(values, BITS, 7))
    assert store.evict(evicted_pages * PAGE).pages == evicted_pages
    decoded, widths = read_code(tensor, 7)
    found, counts = np.unique(widths, return_counts=True)
    assert len(found) <= 2
    expected = sum(
        rotated_error(BITS, int(kept)) * count / COUNT
        for kept, count in zip(found, counts, strict=True)
    )
    assert relative_error(values, decoded) == pytest.approx(expected, rel=0.05)


def test_runs_of_different_width_stay_unbiased() -> None:
    values = np.random.default_rng(1).standard_exponential(COUNT).astype(np.float32)
    store, seeds = PagedStore(page_bytes=PAGE), 8
    total = np.zeros(COUNT)
    for key in range(seeds):
        tensor = write_code(store, encode_rotated(values, BITS, key))
        store.evict((22 + 22 + 11) * PAGE)  # half of the runs keep one plane, half two
        decoded, widths = read_code(tensor, key)
        assert set(widths) == {1, 2}
        total += decoded
        single = relative_error(values, decoded)
    averaged = relative_error(values, total / seeds)
    assert averaged == pytest.approx(single / seeds, rel=0.1)
