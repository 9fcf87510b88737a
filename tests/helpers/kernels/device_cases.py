"""What tests of Triton kernels share: tensors of given bytes on the device, guarded, in pages.

Import it once it is known that Triton is installed.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from reference import codecs as reference
from reference.elements import element_dtype

from daf.core.code_format import ElementType, block_count
from daf.core.code_format import words_per_plane as words_of
from daf.core.policy import Method, Treatment
from daf.kernels import PageFields
from daf.kernels.normalisation import Channels, CodedValues, Decoding
from daf.kernels.triton import codecs
from daf.kernels.triton.planes import DevicePlanes, flat_planes, paged_planes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
KEY = 0xFEDCBA9876543210
TORCH_TYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
}


def to_device(array: np.ndarray) -> torch.Tensor:
    """The same bytes on the device; unsigned words as int32 and int16."""
    signed = {"u": array.dtype.str.replace("u", "i")}.get(array.dtype.kind, array.dtype.str)
    return torch.from_numpy(np.array(array.view(signed))).to(DEVICE)


def elements(array: np.ndarray, kind: ElementType) -> torch.Tensor:
    return to_device(array).view(TORCH_TYPES[kind])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def poisoned(count: int, kind: ElementType) -> torch.Tensor:
    """Fresh elements full of rubbish, the first of a longer tensor, to guard what lies behind."""
    size = element_dtype(kind).itemsize
    memory = torch.full((count * size + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
    return memory[: count * size].view(TORCH_TYPES[kind])


def check_guard(tensor: torch.Tensor) -> None:
    memory = tensor.cpu().untyped_storage()
    whole = torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(tensor.untyped_storage())
    assert (whole[-64:] == 0xA5).all(), "wrote beyond the end"
    assert memory.nbytes() >= tensor.nbytes


def coded(code: reference.Code, count: int, bits: int) -> DevicePlanes:
    headers = to_device(np.ascontiguousarray(code.headers).view(np.uint32).reshape(-1))
    return flat_planes(to_device(np.ascontiguousarray(code.planes)), headers, count, bits)


def allocate_flat(count: int, bits: int, *, headers: bool) -> DevicePlanes:
    """Planes of ``count`` elements, one after the other; content undefined."""
    planes = torch.empty((bits, words_of(count)), dtype=torch.int32, device=DEVICE)
    pairs = torch.empty(block_count(count), dtype=torch.int32, device=DEVICE)
    return flat_planes(planes, pairs if headers else None, count, bits)


def rotated_code(planes: DevicePlanes, key: int) -> CodedValues:
    treatment = Treatment(Method.ROTATED, planes.bits)
    return CodedValues(planes, treatment, key, planes.elements)


def minmax_code(planes: DevicePlanes, key: int = 0) -> CodedValues:
    return CodedValues(planes, Treatment(Method.MINMAX, planes.bits), key, planes.elements)


def encode_rotated(source, planes, key, affine=None) -> None:
    codecs.encode_values(rotated_code(planes, key), source, affine)


def decode_rotated(planes, key, out, *options, **more) -> None:
    codecs.decode_values(rotated_code(planes, key), Decoding(out, *options, **more))


def encode_minmax(source, planes, key, affine=None) -> None:
    codecs.encode_values(minmax_code(planes, key), source, affine)


def decode_minmax(planes, out, *options, **more) -> None:
    codecs.decode_values(minmax_code(planes), Decoding(out, *options, **more))


def assert_code(planes: DevicePlanes, expected: reference.Code) -> None:
    assert planes.headers is not None
    assert bytes_of(planes.headers) == expected.headers.tobytes()
    assert bytes_of(planes.region) == np.ascontiguousarray(expected.planes).tobytes()


def make_affine(cases, channels: int, inner: int) -> tuple[reference.Affine, Channels]:
    ours = reference.Affine(cases.gaussian(channels, 5), cases.gaussian(channels, 6), inner)
    return ours, Channels(to_device(ours.scale), to_device(ours.shift), inner)


def in_pages(
    planes: np.ndarray, headers: np.ndarray, count: int, page_bytes: int, full_runs: int | None
) -> DevicePlanes:
    """The planes and headers laid out in shuffled pages, as the pool would."""
    bits, words = planes.shape
    page_words = page_bytes // 4
    runs = max(1, -(-words // page_words))
    header_pages = -(-headers.nbytes // page_bytes)
    entries = bits * runs + header_pages
    table = np.random.default_rng(3).permutation(entries + 5)[:entries].astype(np.int32)
    region = np.full((entries + 5, page_words), 0xDBDBDBDB, np.uint32)
    for plane in range(bits):
        for run in range(runs):
            piece = planes[plane, run * page_words : (run + 1) * page_words]
            region[table[plane * runs + run], : len(piece)] = piece
    pairs = np.ascontiguousarray(headers).view(np.uint32).reshape(-1)
    for page in range(header_pages):
        piece = pairs[page * page_words : (page + 1) * page_words]
        region[table[bits * runs + page], : len(piece)] = piece
    full = runs if full_runs is None else full_runs
    fields = PageFields(0, page_bytes, 0, count, runs, full, bits, bits)
    return paged_planes(to_device(region), to_device(table.astype(np.int64) * page_words), fields)


def gathered(planes: DevicePlanes) -> tuple[np.ndarray, np.ndarray]:
    """Planes (bits, words) and headers (blocks,) out of their pages."""
    assert planes.table is not None
    region = planes.region.cpu().numpy().view(np.uint32).reshape(-1, planes.page_words)
    table = planes.table.cpu().numpy() // planes.page_words
    body = region[table[: planes.bits * planes.runs]].reshape(planes.bits, -1)
    pairs = region[table[planes.bits * planes.runs :]].reshape(-1)
    return body[:, : words_of(planes.elements)], pairs[: block_count(planes.elements)]
