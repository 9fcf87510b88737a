"""The bytes of the format, pinned. A change here needs a new format number."""

from __future__ import annotations

import numpy as np
import pytest
from reference import codecs as reference
from reference import reductions as reference_reductions
from reference.philox import philox_words

from daf.core import code_tables
from daf.core.code_format import FORMAT_VERSION, ElementType, Predicate

KEY = 0x0123456789ABCDEF
INPUTS = ("smooth", "wild", "mixed", "broken", "peaked")
COUNTS = (1, 31, 255, 256, 257, 4096, 10_007)
AFFINE = reference.Affine(
    np.array([0.5, -2.0, 1.0625], np.float32), np.array([0.0, 0.3, -7.0], np.float32), 5
)
# Borders, scales and shifts of lines, all exact.
LINES = np.concatenate(
    [np.arange(-7, 8) / 8, np.arange(16) % 5 / 16 - 0.125, np.arange(16) / 32]
).astype(np.float32)


def small_digests(cases, oracle=reference) -> dict[str, str]:
    """Every operation over every kind of input, one hash for each pair."""
    found: dict[str, list[np.ndarray]] = {}
    for kind in INPUTS:
        for count in COUNTS:
            for element_type in ElementType:
                source = cases.as_type(getattr(cases, kind)(count, 3), element_type)
                for name, arrays in operations(source, element_type, oracle):
                    found.setdefault(f"{name} {kind} {element_type.name}", []).extend(arrays)
    return {name: cases.digest(*arrays) for name, arrays in found.items()}


def operations(source, element_type, oracle=reference):
    target = reference.Target(len(source), element_type)
    for bits in range(1, 5):
        code = oracle.encode_rotated(source, bits, KEY)
        yield f"rotated-{bits}", code
        for kept in range(1, bits + 1):
            part = reference.Code(code.planes[:kept], code.headers)
            back = oracle.decode_rotated(part, target, bits, KEY)
            yield f"rotated-{bits}-back-{kept}", [back]
    for bits in range(1, 9):
        code = oracle.encode_minmax(source, bits, KEY)
        yield f"minmax-{bits}", code
        yield f"minmax-{bits}-back", [oracle.decode_minmax(code, target, bits)]
        planes = oracle.encode_steps(source, bits, KEY)
        yield f"steps-{bits}", [planes, oracle.decode_steps(planes, target)]
    for bits in (1, 2, 3, 8):
        planes = oracle.encode_derivative(source, bits, KEY, LINES * np.float32(2**bits))
        if planes is not None:
            levels = np.arange(2**bits, dtype=np.float32) / 7
            back = oracle.decode_derivative(planes, len(source), levels, element_type)
            yield f"derivative-{bits}", [planes, back]
    words = oracle.encode_mask(source, Predicate.INSIDE, 0.0, 6.0)
    yield "mask", [words, oracle.encode_mask(source, Predicate.ABOVE, 0.25, 0.0)]
    after = reference.Target(len(source), element_type, accumulate_onto=source, mask=words)
    code = oracle.encode_rotated(source, 2, KEY, AFFINE)
    yield "rotated-affine", [*code, oracle.decode_rotated(code, after, 2, KEY, AFFINE)]
    code = oracle.encode_minmax(source, 4, KEY, AFFINE)
    yield "minmax-affine", [*code, oracle.decode_minmax(code, after, 4, AFFINE)]
    planes = oracle.encode_steps(source, 4, KEY, AFFINE)
    yield "steps-affine", [planes, oracle.decode_steps(planes, target, AFFINE)]
    for channels, inner in ((1, 1), (3, 5), (48, 1), (7, 1)):
        name = f"{channels}-{inner}"
        yield f"ranges-{name}", reference_reductions.measure_ranges(source, channels, inner)
        yield f"sums-{name}", reference_reductions.measure_sums(source, channels, inner)


def large_digests(cases, count: int = 2**25) -> dict[str, str]:
    """One tensor of 32 M elements: rare coincidences that small tests miss."""
    source, target = cases.smooth(count, 11), reference.Target(count)
    code = reference.encode_rotated(source, 4, KEY)
    found = {"rotated-4": cases.digest(*code)}
    found["rotated-4-back"] = cases.digest(reference.decode_rotated(code, target, 4, KEY))
    code = reference.encode_rotated(cases.peaked(count, 11), 2, KEY)
    found["rotated-2-peaked"] = cases.digest(*code)
    code = reference.encode_minmax(source, 8, KEY)
    found["minmax-8"] = cases.digest(*code)
    found["minmax-8-back"] = cases.digest(reference.decode_minmax(code, target, 8))
    return found


def table_patterns() -> dict[str, list[int]]:
    """Every table of ``rotated``; factors as bit patterns."""
    found = {}
    for bits in range(1, 5):
        found[f"thresholds-{bits}"] = code_tables.rotated_thresholds(bits).ravel().tolist()
        for kept in range(1, bits + 1):
            found[f"levels-{bits}-{kept}"] = code_tables.rotated_levels(bits, kept).tolist()
            factor = np.float32(code_tables.rotated_level_factor(bits, kept))
            found[f"factor-{bits}-{kept}"] = [int(factor.view(np.uint32))]
    return found


def test_format_number(golden) -> None:
    assert golden["format"] == FORMAT_VERSION


def test_tables(golden) -> None:
    assert table_patterns() == golden["tables"]


def test_small_cases(cases, golden) -> None:
    assert small_digests(cases) == golden["small"]


@pytest.mark.thorough
def test_32_million_elements(cases, golden) -> None:
    assert large_digests(cases) == golden["large"]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_numbers_its_authors_publish(counter, key, words) -> None:
    """Known answers of Random123 (kat_vectors, philox4x32 10)."""
    upper = np.uint64(counter & 0xFFFFFFFF)
    blocks = np.array([counter], np.uint64)
    assert tuple(philox_words(key, blocks, np.array([upper]), int(upper))[0, 0]) == words
