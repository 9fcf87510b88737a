"""Triton kernels against the oracle, byte for byte: on a GPU, or under Triton's interpreter.

Without a GPU these skip here; ``test_gpu_interpreted`` runs them in a process that interprets.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import codecs as reference

from daf.core.code_format import ElementType, Predicate, block_count
from daf.core.code_format import words_per_plane as words_of
from daf.core.errors import KernelError
from daf.kernels import Codec
from daf.kernels.normalisation import ElementCode

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; test_gpu_interpreted runs these", allow_module_level=True)

import device_cases
from device_cases import (
    DEVICE,
    KEY,
    allocate_flat,
    assert_code,
    bytes_of,
    check_guard,
    coded,
    elements,
    gathered,
    in_pages,
    make_affine,
    poisoned,
    to_device,
)

from daf.kernels.triton import codecs as triton_codecs
from daf.kernels.triton.planes import flat_planes

TYPES = tuple(ElementType)
INPUTS = ("smooth", "wild", "mixed", "broken", "peaked")
COUNTS = (5, 2049) if INTERPRETED else (1, 17, 255, 256, 257, 5000, 70_001, 2**21)
RAGGED = (1, 255, 256, 257, 512)  # about the ends of blocks; 2049 ends in a lone element
VALUE_COUNTS = tuple(sorted({*COUNTS, *RAGGED}))
# The interpreter takes a second for each of these.
IN_TURNS = [
    (kind, bits)
    for kind, bits in itertools.product(TYPES, (1, 2, 3, 4))
    if not INTERPRETED or bits % 3 == kind
]
MANY = 64 * 256 + 300  # more than one program, even where the interpreter's tiles are wide


@pytest.fixture(autouse=True)
def quiet_arithmetic():
    """The interpreter computes in NumPy, which warns of infinities that kernels mean to meet."""
    with np.errstate(all="ignore"):
        yield


# --- rotated --------------------------------------------------------------------------------


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations on a GPU; interpreted, some in which every value occurs."""
    if not INTERPRETED:
        return list(itertools.product(*axes))
    longest = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)]


def check_rotated(source, kind, bits, key, kept_planes) -> None:
    """The oracle's code, and from the first so many of its planes the oracle's values."""
    count = len(source)
    expected = reference.encode_rotated(source, bits, key)
    planes = allocate_flat(count, bits, headers=True)
    device_cases.encode_rotated(elements(source, kind), planes, key)
    assert_code(planes, expected)
    for kept in kept_planes:
        part = reference.Code(expected.planes[:kept], expected.headers)
        values = reference.decode_rotated(part, reference.Target(count, kind), bits, key)
        found = poisoned(count, kind)
        device_cases.decode_rotated(coded(part, count, bits), key, found)
        assert bytes_of(found) == values.tobytes(), (count, kept)
        check_guard(found)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rotated_codes_and_values_are_the_oracle_s(cases, bits, kind) -> None:
    for place, count in enumerate(VALUE_COUNTS):
        name = INPUTS[(place + bits + kind) % len(INPUTS)]
        source = cases.as_type(getattr(cases, name)(count), kind)
        kept_planes = range(1, bits + 1)
        if INTERPRETED and count != 257:  # a call takes as long whatever it is of
            kept_planes = (1 + place % bits,)
        check_rotated(source, kind, bits, KEY, kept_planes)


@pytest.mark.parametrize(("kind", "bits"), IN_TURNS)
def test_in_turns_usual_blocks_and_others_are_the_oracle_s(
    cases, bits, kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large tensors are coded: two kernels, of several turns. The tiny are unusual blocks."""
    monkeypatch.setattr(triton_codecs, "_ELEMENTS_FOR_TURNS", 1)
    monkeypatch.setattr("daf.kernels.triton.launch._INTERPRETER_BLOCKS", 2)
    for count in (1500,) if INTERPRETED else (257, 5000, 70_001):
        ordinary = cases.as_type(cases.smooth(count), kind)
        check_rotated(ordinary, kind, bits, KEY, (bits,))
        among = cases.as_type(cases.mixed(count), kind)
        among[: count // 2] = ordinary[: count // 2]
        among[256:512] = 0
        among[512:768] = cases.as_type(cases.peaked(1024)[512:768], kind)[: len(among[512:768])]
        check_rotated(among, kind, bits, KEY, (1 + bits // 2, bits))


@settings(max_examples=20, deadline=None)
@given(
    st.data(),
    st.integers(1, 4),
    st.sampled_from(TYPES),
    st.integers(1, 1100 if INTERPRETED else 100_000),
    st.sampled_from(INPUTS),
)
def test_any_rotated_code_is_the_oracle_s(cases, data, bits, kind, count, name) -> None:
    kept = data.draw(st.integers(1, bits), label="kept")
    seed = data.draw(st.integers(1, 2**16), label="seed")
    key = data.draw(st.integers(0, 2**64 - 1), label="key")
    source = cases.as_type(getattr(cases, name)(count, seed), kind)
    check_rotated(source, kind, bits, key, (kept,))


@pytest.mark.parametrize("name", INPUTS)
def test_every_kind_of_input_over_many_blocks(cases, name) -> None:
    source = getattr(cases, name)(MANY)
    for bits in (2, 4):
        planes = allocate_flat(MANY, bits, headers=True)
        device_cases.encode_rotated(elements(source, ElementType.FLOAT32), planes, KEY)
        expected = reference.encode_rotated(source, bits, KEY)
        assert_code(planes, expected)
        target = reference.Target(MANY)
        values = reference.decode_rotated(expected, target, bits, KEY)
        found = poisoned(MANY, ElementType.FLOAT32)
        device_cases.decode_rotated(planes, KEY, found)
        assert bytes_of(found) == values.tobytes()
    planes = allocate_flat(MANY, 5, headers=True)
    device_cases.encode_minmax(elements(source, ElementType.FLOAT32), planes, KEY)
    assert_code(planes, reference.encode_minmax(source, 5, KEY))


@pytest.mark.parametrize("key", [0, 1, 2**32, 2**63 + 16, 2**64 - 1])
def test_keys_whose_halves_compilers_treat_specially(cases, key) -> None:
    source = cases.smooth(700)
    rotated = allocate_flat(700, 3, headers=True)
    device_cases.encode_rotated(elements(source, ElementType.FLOAT32), rotated, key)
    assert_code(rotated, reference.encode_rotated(source, 3, key))
    ranged = allocate_flat(700, 4, headers=True)
    device_cases.encode_minmax(elements(source, ElementType.FLOAT32), ranged, key)
    assert_code(ranged, reference.encode_minmax(source, 4, key))


@pytest.mark.parametrize(
    ("kind", "channels", "inner"), [(0, 96, 1), (1, 3, 1), (2, 7, 256), (0, 5, 49), (1, 1, 1)]
)
def test_affine_accumulate_and_mask_come_in_this_order(cases, kind, channels, inner) -> None:
    count, kind = 700, ElementType(kind)
    source = cases.as_type(cases.smooth(count), kind)
    ours, theirs = make_affine(cases, channels, inner)
    onto = cases.as_type(cases.gaussian(count, 8), kind)
    words = reference.encode_mask(cases.gaussian(count, 9), Predicate.ABOVE, 0.0, 0.0)
    target = reference.Target(count, kind, onto, words)
    mask = flat_planes(to_device(words), None, count, 1)

    expected = reference.encode_rotated(source, 3, KEY, ours)
    rotated = allocate_flat(count, 3, headers=True)
    device_cases.encode_rotated(elements(source, kind), rotated, KEY, theirs)
    assert_code(rotated, expected)
    found = elements(onto, kind)
    device_cases.decode_rotated(rotated, KEY, found, theirs, mask, accumulate=True)
    values = reference.decode_rotated(expected, target, 3, KEY, ours)
    assert bytes_of(found) == values.tobytes()

    expected = reference.encode_minmax(source, 6, KEY, ours)
    ranged = allocate_flat(count, 6, headers=True)
    device_cases.encode_minmax(elements(source, kind), ranged, KEY, theirs)
    assert_code(ranged, expected)
    found = elements(onto, kind)
    device_cases.decode_minmax(ranged, found, theirs, mask, accumulate=True)
    assert bytes_of(found) == reference.decode_minmax(expected, target, 6, ours).tobytes()


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_by_themselves_are_those_of_the_whole(cases, kind) -> None:
    """Wherever a part begins and ends, affine, accumulate and mask are those of its places."""
    count, kind = 5 * 256 + 77, ElementType(kind)
    ours, theirs = make_affine(cases, 7, 49)
    source = cases.as_type(cases.smooth(count), kind)
    onto = cases.as_type(cases.gaussian(count, 8), kind)
    words = reference.encode_mask(cases.gaussian(count, 9), Predicate.ABOVE, 0.0, 0.0)
    target = reference.Target(count, kind, onto, words)
    mask = flat_planes(to_device(words), None, count, 1)
    rotated = reference.encode_rotated(source, 3, KEY)
    ranged = reference.encode_minmax(source, 6, KEY)
    for planes, values, options in (
        (
            in_pages(*rotated, count, 256, None),
            reference.decode_rotated(rotated, target, 3, KEY, ours),
            (KEY,),
        ),
        (coded(ranged, count, 6), reference.decode_minmax(ranged, target, 6, ours), ()),
    ):
        decode = device_cases.decode_rotated if options else device_cases.decode_minmax
        for first, last in ((0, 1), (1, 4), (5, 6), (0, 6)):
            here = slice(first * 256, min(last * 256, count))
            found = elements(onto[here], kind)
            decode(planes, *options, found, theirs, mask, True, (first, last))
            assert bytes_of(found) == values[here].tobytes(), (first, last)
        for wrong in ((0, 7), (3, 3), (-1, 2)):
            with pytest.raises(KernelError, match="give a range within"):
                decode(planes, *options, found, blocks=wrong)


# --- minmax ---------------------------------------------------------------------------------


def check_minmax(source, kind, bits, key) -> None:
    count = len(source)
    expected = reference.encode_minmax(source, bits, key)
    planes = allocate_flat(count, bits, headers=True)
    device_cases.encode_minmax(elements(source, kind), planes, key)
    assert_code(planes, expected)
    found = poisoned(count, kind)
    device_cases.decode_minmax(planes, found)
    values = reference.decode_minmax(expected, reference.Target(count, kind), bits)
    assert bytes_of(found) == values.tobytes(), count
    check_guard(found)


@pytest.mark.parametrize(("bits", "kind"), covering(range(1, 9), TYPES))
def test_minmax_codes_and_values_are_the_oracle_s(cases, bits, kind) -> None:
    for place, count in enumerate(VALUE_COUNTS):
        name = INPUTS[(place + bits + kind) % len(INPUTS)]
        check_minmax(cases.as_type(getattr(cases, name)(count), kind), kind, bits, KEY)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 8),
    st.sampled_from(TYPES),
    st.integers(1, 1100 if INTERPRETED else 100_000),
    st.sampled_from(INPUTS),
    st.integers(1, 2**16),
    st.integers(0, 2**64 - 1),
)
def test_any_minmax_code_is_the_oracle_s(cases, bits, kind, count, name, seed, key) -> None:
    check_minmax(cases.as_type(getattr(cases, name)(count, seed), kind), kind, bits, key)


def check_steps(source, kind, bits, key, affines=(None, None)) -> None:
    count, (ours, theirs) = len(source), affines
    expected = reference.encode_steps(source, bits, key, ours)
    planes = allocate_flat(count, bits, headers=False)
    steps = ElementCode(Codec.STEPS, theirs, key)
    triton_codecs.encode_elements(elements(source, kind), planes, steps)
    assert bytes_of(planes.region) == np.ascontiguousarray(expected).tobytes(), count
    found = poisoned(count, kind)
    triton_codecs.decode_elements(planes, found, steps)
    values = reference.decode_steps(expected, reference.Target(count, kind), ours)
    assert bytes_of(found) == values.tobytes(), count
    check_guard(found)


@pytest.mark.parametrize(("bits", "kind"), covering(range(1, 9), TYPES))
def test_steps_are_the_oracle_s(cases, bits, kind) -> None:
    affines = make_affine(cases, 3, 5)
    for place, count in enumerate(VALUE_COUNTS):
        source = cases.as_type(getattr(cases, INPUTS[(place + bits) % len(INPUTS)])(count), kind)
        check_steps(source, kind, bits, KEY, affines if place % 2 else (None, None))


# --- mask, derivative, integers -------------------------------------------------------------


def integers(base: int) -> ElementCode:
    return ElementCode(Codec.INTEGERS, base=base)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("predicate", "low", "high"),
    [
        (Predicate.INSIDE, 0.0, float("nan")),
        (Predicate.INSIDE, 0.0, 6.0),
        (Predicate.ABOVE, 0.1, 0.0),
    ],
)
def test_masks_are_the_oracle_s(cases, predicate, low, high, kind) -> None:
    for count in COUNTS:
        source = cases.as_type(cases.broken(count) * np.float32(4), kind)
        expected = reference.encode_mask(source, predicate, low, high)
        planes = allocate_flat(count, 1, headers=False)
        mask = ElementCode(Codec.MASK, predicate=predicate, low=low, high=high)
        triton_codecs.encode_elements(elements(source, kind), planes, mask)
        assert bytes_of(planes.region) == expected.tobytes()
        found = poisoned(count, kind)
        triton_codecs.decode_elements(planes, found, ElementCode(Codec.MASK, low=-0.0, high=1.25))
        values = reference.decode_mask(expected, count, -0.0, 1.25, kind)
        assert bytes_of(found) == values.tobytes()
        check_guard(found)


@pytest.mark.parametrize("kind", TYPES)
def test_a_mask_is_applied_to_a_gradient_without_being_decoded(cases, kind) -> None:
    count = 1000
    gradient = cases.as_type(cases.broken(count, 4), kind)
    words = reference.encode_mask(cases.gaussian(count), Predicate.ABOVE, 0.0, 0.0)
    found = poisoned(count, kind)
    triton_codecs.apply_mask(
        flat_planes(to_device(words), None, count, 1), elements(gradient, kind), found
    )
    chosen = reference.decode_mask(words, count, 0.0, 1.0, ElementType.FLOAT32) == 1
    kept = torch.where(torch.from_numpy(chosen).to(DEVICE), elements(gradient, kind), 0.0)
    assert torch.equal(found.isnan(), kept.isnan())
    assert bytes_of(found.nan_to_num(nan=3.0)) == bytes_of(kept.nan_to_num(nan=3.0))
    check_guard(found)


@pytest.mark.parametrize(("bits", "kind"), covering((1, 2, 3, 8), TYPES))
def test_derivative_codes_are_the_oracle_s(cases, bits, kind) -> None:
    lines = cases.lines(11, bits)
    levels = cases.gaussian(2**bits, 12)
    for count in COUNTS:
        source = cases.as_type(cases.gaussian(count, 13), kind)
        expected = reference.encode_derivative(source, bits, KEY, lines)
        assert expected is not None
        planes = allocate_flat(count, bits, headers=False)
        slopes = ElementCode(Codec.DERIVATIVE, key=KEY, table=to_device(lines))
        assert not triton_codecs.encode_elements(elements(source, kind), planes, slopes)
        assert bytes_of(planes.region) == expected.tobytes()
        found = poisoned(count, kind)
        of_levels = ElementCode(Codec.DERIVATIVE, table=to_device(levels))
        triton_codecs.decode_elements(planes, found, of_levels)
        values = reference.decode_derivative(expected, count, levels, kind)
        assert bytes_of(found) == values.tobytes()
        check_guard(found)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_derivative_code_tells_of_what_is_not_finite(cases, value) -> None:
    source = cases.gaussian(40_000)
    source[39_999] = value
    planes = allocate_flat(40_000, 2, headers=False)
    slopes = ElementCode(Codec.DERIVATIVE, table=to_device(cases.lines(1, 2)))
    assert triton_codecs.encode_elements(to_device(source), planes, slopes)


@pytest.mark.parametrize(
    ("item", "bits"), covering((np.int8, np.int16, np.int32, np.int64), (1, 5, 7))
)
def test_integers_come_back(cases, item, bits) -> None:
    for count, base in ((1, -3), (5000, 7), (257, -(2**63) if item is np.int64 else -100)):
        words = cases.words(count, 21).astype(np.int64) % 2**bits
        source = (words + base).astype(item)
        fits = (source.astype(np.int64) == words + base).all()
        if not fits:
            continue
        expected = reference.encode_integers(source, bits, base)
        planes = allocate_flat(count, bits, headers=False)
        assert not triton_codecs.encode_elements(to_device(source), planes, integers(base))
        assert bytes_of(planes.region) == expected.tobytes()
        found = torch.zeros(count, dtype=to_device(source).dtype, device=DEVICE)
        triton_codecs.decode_elements(planes, found, integers(base))
        assert bytes_of(found) == source.tobytes()


def test_whole_words_booleans_and_integers_that_do_not_fit(cases) -> None:
    source = cases.words(600, 2).astype(np.int64) * 0x1_0000_0001 - 2**62
    planes = allocate_flat(600, 64, headers=False)
    assert not triton_codecs.encode_elements(to_device(source), planes, integers(0))
    assert bytes_of(planes.region) == reference.encode_integers(source, 64, 0).tobytes()
    flags = to_device((source % 2).astype(np.int8)).bool()
    one = allocate_flat(600, 1, headers=False)
    assert not triton_codecs.encode_elements(flags, one, integers(0))
    found = torch.zeros_like(flags)
    triton_codecs.decode_elements(one, found, integers(0))
    assert torch.equal(found, flags)
    source[599] = source[0] + 5
    narrow = allocate_flat(600, 2, headers=False)
    assert triton_codecs.encode_elements(to_device(source), narrow, integers(int(source[0])))


# --- pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "page_bytes"), [(1, 32), (257, 512), (3000, 32), (5000, 512)])
def test_pages_hold_what_flat_planes_hold(cases, count, page_bytes) -> None:
    source = cases.smooth(count)
    blank = np.full((3, words_of(count)), 0xDBDBDBDB, np.uint32)
    pairs = np.zeros((block_count(count), 2), np.uint16)
    for encode, expected in (
        (
            lambda planes: device_cases.encode_rotated(to_device(source), planes, KEY),
            reference.encode_rotated(source, 3, KEY),
        ),
        (
            lambda planes: device_cases.encode_minmax(to_device(source), planes, KEY),
            reference.encode_minmax(source, 3, KEY),
        ),
    ):
        planes = in_pages(blank, pairs, count, page_bytes, None)
        unused = len(planes.region) - len(planes.table)
        encode(planes)
        body, headers = gathered(planes)
        assert body.tobytes() == np.ascontiguousarray(expected.planes).tobytes()
        assert headers.tobytes() == expected.headers.tobytes()
        untouched = (planes.region.cpu().numpy().view(np.uint32) == 0xDBDBDBDB).all(axis=1)
        assert untouched.sum() >= unused


@pytest.mark.parametrize(("full_runs", "masked"), [(0, True), (1, False), (3, True), (5, False)])
def test_runs_that_lost_a_plane_decode_from_what_is_left(cases, full_runs, masked) -> None:
    page_bytes, bits, count = 128, 3, 5 * 1024 - 100  # five runs of four blocks
    source = cases.smooth(count)
    code = reference.encode_rotated(source, bits, KEY)
    lossy = np.array(code.planes)
    lossy[bits - 1, full_runs * page_bytes // 4 :] = 0xDBDBDBDB
    planes = in_pages(lossy, code.headers, count, page_bytes, full_runs)
    words = reference.encode_mask(cases.gaussian(count), Predicate.ABOVE, 0.0, 0.0)
    no_headers = np.zeros((0, 2), np.uint16)
    mask = in_pages(words, no_headers, count, 32, None) if masked else None
    found = poisoned(count, ElementType.FLOAT32)
    device_cases.decode_rotated(planes, KEY, found, mask=mask)
    target = reference.Target(count, mask=words if masked else None)
    whole = reference.decode_rotated(code, target, bits, KEY)
    part = reference.decode_rotated(
        reference.Code(code.planes[: bits - 1], code.headers), target, bits, KEY
    )
    edge = full_runs * page_bytes * 8
    assert bytes_of(found) == np.concatenate([whole[:edge], part[edge:]]).tobytes()
    check_guard(found)


def test_masks_derivatives_and_integers_live_in_pages_too(cases) -> None:
    count, bits = 3000, 2
    source = cases.gaussian(count)
    no_headers = np.zeros((0, 2), np.uint16)
    blank = np.zeros((bits, words_of(count)), np.uint32)
    lines = cases.lines(3, bits)
    planes = in_pages(blank, no_headers, count, 64, None)
    slopes = ElementCode(Codec.DERIVATIVE, key=KEY, table=to_device(lines))
    assert not triton_codecs.encode_elements(to_device(source), planes, slopes)
    expected = reference.encode_derivative(source, bits, KEY, lines)
    assert gathered(planes)[0].tobytes() == expected.tobytes()
    items = (cases.words(count, 4) % 4).astype(np.int16)
    assert not triton_codecs.encode_elements(to_device(items), planes, integers(0))
    assert gathered(planes)[0].tobytes() == reference.encode_integers(items, bits, 0).tobytes()
    found = torch.zeros(count, dtype=torch.int16, device=DEVICE)
    triton_codecs.decode_elements(planes, found, integers(0))
    assert bytes_of(found) == items.tobytes()


# --- contract -------------------------------------------------------------------------------


def test_calls_outside_the_contract_are_refused() -> None:
    planes = allocate_flat(300, 4, headers=True)
    source = torch.zeros(300, device=DEVICE)
    with pytest.raises(KernelError, match="64 bits"):
        device_cases.encode_rotated(source, planes, 2**64)
    with pytest.raises(KernelError, match="float64"):
        device_cases.encode_rotated(source.double(), planes, KEY)
    with pytest.raises(KernelError, match="300 elements"):
        device_cases.encode_rotated(source[:299], planes, KEY)
    with pytest.raises(KernelError, match="memory order"):
        device_cases.encode_minmax(source.expand(1, 300).reshape(150, 2).t(), planes, KEY)
    with pytest.raises(KernelError, match="some of them evicted"):
        device_cases.decode_minmax(planes._replace(kept=3), source)
    with pytest.raises(KernelError, match="without headers"):
        device_cases.decode_minmax(allocate_flat(300, 4, headers=False), source)
    with pytest.raises(KernelError, match="words"):
        flat_planes(torch.zeros((1, 4), dtype=torch.int32), None, 300, 1)
    intervals = ElementCode(Codec.DERIVATIVE, table=source)
    with pytest.raises(KernelError, match="47 lines' numbers"):
        triton_codecs.encode_elements(source, allocate_flat(300, 2, headers=False), intervals)


def test_nothing_is_done_for_no_elements() -> None:
    planes = allocate_flat(0, 2, headers=True)
    device_cases.encode_rotated(torch.zeros(0, device=DEVICE), planes, KEY)
    assert planes.region.numel() == 0
