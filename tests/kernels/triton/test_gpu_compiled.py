"""What the interpreter cannot see: every kernel through the real compiler, with no GPU at hand.

Each is compiled to PTX (and by ``ptxas`` to machine code) for a Hopper GPU, and
the PTX is read: nothing is contracted, flushed, approximated or divided fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from daf.kernels.triton import bit_codecs as triton_bits
from daf.kernels.triton import minmax as triton_minmax
from daf.kernels.triton import norm_kernels as triton_norm_kernels
from daf.kernels.triton import reduction_kernels as triton_reduction_kernels
from daf.kernels.triton import rotated as triton_rotated
from daf.kernels.triton.launch import Affine
from daf.kernels.triton.planes import NO_PLANES, PlaneWords
from daf.kernels.triton.reductions import Runs, SideBySide

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("lines", "scale", "shift", "table", "levels", "factors"), "*fp32"),
    **dict.fromkeys(("worthless", "least", "greatest"), "*i32"),
    **dict.fromkeys(("low_out", "high_out"), "*i32"),
    **dict.fromkeys(("sums", "squares"), "*fp64"),
    **dict.fromkeys(("low", "high", "off_value", "on_value", "most"), "fp32"),
    **dict.fromkeys(("gamma", "beta", "of_gradient", "of_value", "offset"), "*fp32"),
    **dict.fromkeys(("mean", "inverse_deviation", "running_mean", "running_variance"), "*fp32"),
    **dict.fromkeys(("weight", "bias", "own_scale"), "*fp32"),
    **dict.fromkeys(("epsilon", "momentum", "bessel"), "i64"),
    "kept": "fp32",
    "products": "*fp64",
    "rows": "i32",
    "span_sums": "*fp32",
    "out": "*fp64",
}
ELEMENTS = {0: "*i32", 1: "*i16", 2: "*i16"}
FORBIDDEN = re.compile(r"\bfma\b|\bmad\.[a-z.]*f32|\.ftz|\.approx|div\.full|\brcp\b|\brsqrt\b")
CODED = {"BLOCKS": 4}
READ = CODED | {"ACCUMULATE": True}
IN_PAGES = PlaneWords("*i32", "*i32", "*i64", "i32", "i32")
FLAT = IN_PAGES._replace(table="constexpr")
ABSENT = PlaneWords(*["constexpr"] * 5)
AFFINE = Affine("*fp32", "*fp32", "i32", "i32")
SHAPES = {"runs": Runs(*["i32"] * 8), "sides": SideBySide(*["i32"] * 4)}


def kernels() -> list[tuple[str, object, dict[str, object]]]:
    found: list[tuple[str, object, dict[str, object]]] = []

    def add(kernel: object, **constants: object) -> None:
        label = "-".join(f"{name}={value}" for name, value in fixed(constants).items())
        found.append((f"{kernel.__name__}-{label}", kernel, constants))

    for kind, bits in ((0, 4), (1, 2), (2, 1)):
        rotated = {"TYPE": kind, "BITS": bits, "KEPT": bits}
        for which in (0, 1, 2):
            turns = {"TURNS": 8, "BLOCKS": 2} if which else {"TURNS": 1, "BLOCKS": 4}
            add(triton_rotated.encode_rotated, **rotated, WHICH=which, **turns)
        add(triton_rotated.decode_rotated, **rotated, **READ)
    for kind in (0, 1, 2):
        for has_grid in (True, False):
            grid = {"TYPE": kind, "BITS": 8 - kind, "HAS_GRID": has_grid}
            add(triton_minmax.encode_minmax, **grid, **CODED)
            add(triton_minmax.decode_minmax, **grid, **READ)
    add(triton_bits.encode_mask, TYPE=0, ABOVE=False, **CODED)
    add(triton_bits.decode_mask, TYPE=2, **CODED)
    add(triton_bits.apply_mask, TYPE=1, **CODED)
    add(triton_bits.encode_derivative, TYPE=1, BITS=3, **CODED)
    add(triton_bits.decode_derivative, TYPE=2, BITS=3, **CODED)
    flat = {"affine": None, "planes": FLAT, "BLOCKS": 4}
    whole = {"WHICH": 0, "TURNS": 1}
    add(triton_rotated.encode_rotated, TYPE=0, BITS=2, KEPT=2, **whole, **flat)
    add(
        triton_rotated.decode_rotated, TYPE=0, BITS=2, KEPT=1, mask=ABSENT, ACCUMULATE=False, **flat
    )
    tile = {"TYPE": 1, "STEPS": 4}
    for strategy, columns in ((0, 1), (1, 1), (2, 32), (3, 1), (3, 32)):
        shape = {"STRATEGY": strategy, "ROWS": 2048 // columns, "COLUMNS": columns}
        add(triton_reduction_kernels.reduce_ranges, **tile, **shape)
    add(triton_reduction_kernels.finish_ranges, ROWS=512, COLUMNS=8)
    norms, sums = triton_norm_kernels, triton_reduction_kernels
    squares = {"values": None, "mask": ABSENT, "affine": None, "TYPE": 1, "VALUE_TYPE": 1}
    add(sums.channel_span_sums, COLUMNS=8, **squares)
    add(sums.side_by_side_sums, SPANS=8, COLUMNS=16, **squares)
    for kind in (0, 1, 2):
        around = {"TYPE": kind, "BLOCKS": 4}
        add(norms.emit, **around)
        add(norms.emit, result=None, addend=None, mask=ABSENT, **around)
        add(norms.derive, ACCUMULATE=True, **around)
        for values in {0, kind}:
            read = {"TYPE": kind, "VALUE_TYPE": values} | (
                {} if values == kind else {"affine": None}
            )
            add(sums.channel_span_sums, COLUMNS=8, **read)
            add(sums.side_by_side_sums, SPANS=8, COLUMNS=128, **read)
            add(norms.write_gradient, BLOCKS=4, **read)
            add(norms.row_factors, CENTRED=True, ROWS=8, **read)
            add(norms.column_span_sums, SPAN_ROWS=256, COLUMNS=128, **read)
    add(norms.channel_statistics, COLUMNS=128)
    add(norms.channel_factors, COLUMNS=128)
    for width in (1, 64, 4096):
        shape = {"WIDTH": width, "LEVELS": width.bit_length() - 1, "COLUMNS": min(8, 4096 // width)}
        add(triton_reduction_kernels.fold_halves, **shape)
    add(norms.row_affines, TYPE=1, CENTRED=True, ROWS=8)
    add(norms.add_spans, COLUMNS=128)
    for bits in (5, 64):
        add(triton_bits.encode_integers, BITS=bits, **CODED)
        add(triton_bits.decode_integers, BITS=bits, **CODED)
    return found


def with_marks(found: list[tuple[str, object, dict[str, object]]]) -> Iterator[Any]:
    """Each kernel once for every change; its other types and widths with ``--all``."""
    seen = set()
    for name, kernel, constants in found:
        marks = pytest.mark.thorough if kernel in seen else ()
        seen.add(kernel)
        yield pytest.param(kernel, constants, id=name, marks=marks)


def signature_of(kernel: object, constants: dict[str, object]) -> dict[str, str]:
    types = dict(POINTERS)
    elements = ELEMENTS[constants.get("TYPE", 1)]
    types |= dict.fromkeys(("source", "destination", "gradient", "addend"), elements)
    types["values"] = ELEMENTS[constants.get("VALUE_TYPE", 0)]
    if kernel is triton_norm_kernels.column_span_sums:
        types |= dict.fromkeys(("sums", "products"), "*fp32")
    if kernel is triton_reduction_kernels.fold_halves:
        types["rows"] = "*fp64"
    types |= dict.fromkeys(("planes", "mask"), IN_PAGES) | dict.fromkeys(
        ("affine", "result"), AFFINE
    )
    types |= SHAPES
    if "first_block" in kernel.arg_names or kernel is triton_norm_kernels.row_factors:
        types["of_value"] = AFFINE
    types |= {name: value for name, value in constants.items() if isinstance(value, PlaneWords)}
    return {
        name: "constexpr" if name in fixed(constants) else types.get(name, "i32")
        for name in kernel.arg_names
    }


def fixed(constants: dict[str, object]) -> dict[str, object]:
    """Those that are values, not where planes lie."""
    return {name: value for name, value in constants.items() if not isinstance(value, PlaneWords)}


def source_of(kernel: object, constants: dict[str, object]) -> ASTSource:
    known: dict[Any, object] = dict(fixed(constants))
    for place, name in enumerate(kernel.arg_names):
        if constants.get(name) is FLAT:
            known[place, FLAT._fields.index("table")] = None
        if constants.get(name) is ABSENT:
            known |= {(place, field): value for field, value in enumerate(NO_PLANES)}
    return ASTSource(kernel, signature_of(kernel, constants), constexprs=known)


@pytest.mark.parametrize(("kernel", "constants"), list(with_marks(kernels())))
def test_every_kernel_compiles_to_plain_ieee_arithmetic(kernel, constants) -> None:
    source = source_of(kernel, constants)
    options = {"enable_fp_fusion": False, "num_warps": 4}
    compiled = triton.compile(source, target=HOPPER, options=options)
    ptx = compiled.asm["ptx"]
    assert FORBIDDEN.findall(ptx) == []
    assert len(compiled.asm["cubin"]) > 0
    if kernel is triton_rotated.encode_rotated:
        assert "div.rn.f32" in ptx
        assert "sqrt.rn.f32" in ptx
    if kernel in (triton_norm_kernels.channel_statistics, triton_norm_kernels.row_affines):
        assert "div.rn.f64" in ptx
        assert "sqrt.rn.f64" in ptx


def test_the_forbidden_is_found_where_contraction_is_on() -> None:
    """The check can fail: with contraction allowed, the decoder's product and sum become one."""
    constants = {"TYPE": 0, "BITS": 8} | READ
    kernel = triton_minmax.decode_minmax
    source = source_of(kernel, constants)
    options = {"enable_fp_fusion": True, "num_warps": 4}
    compiled = triton.compile(source, target=HOPPER, options=options)
    assert FORBIDDEN.findall(compiled.asm["ptx"]) != []
