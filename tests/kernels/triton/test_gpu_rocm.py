"""Kernels through the compiler for an AMD GPU, with none at hand.

A few small ones: ``encode_rotated`` compiles too, in more than half a minute. Nothing is run.
"""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from daf.kernels.triton import bit_codecs as triton_bits
from daf.kernels.triton import minmax as triton_minmax
from daf.kernels.triton.launch import Affine
from daf.kernels.triton.planes import PlaneWords

if "amd" not in backends:
    pytest.skip("this Triton has no back end for AMD's GPUs", allow_module_level=True)

MI300 = GPUTarget("hip", "gfx942", 64)
PLANES = PlaneWords("*i32", "*i32", "*i64", "i32", "i32")
MASK = {"source": "*i32", "planes": PLANES, "low": "fp32", "high": "fp32"}
AFFINE = Affine("*fp32", "*fp32", "i32", "i32")
MINMAX = {"planes": PLANES, "mask": PLANES, "affine": AFFINE, "destination": "*i32"}
DERIVATIVE = {"planes": PLANES, "levels": "*fp32", "destination": "*i16"}
IN_PAGES = {"BLOCKS": 4}
READ = IN_PAGES | {"ACCUMULATE": True}


def compiled_for_amd(kernel, types, constants, *, fused: bool = False):
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"enable_fp_fusion": fused, "num_warps": 4}
    return triton.compile(source, target=MI300, options=options)


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (triton_bits.encode_mask, MASK, {"TYPE": 0, "ABOVE": False, **IN_PAGES}),
        (triton_bits.decode_derivative, DERIVATIVE, {"TYPE": 2, "BITS": 3, **IN_PAGES}),
        (triton_minmax.decode_minmax, MINMAX, {"TYPE": 0, "BITS": 4, **READ}),
    ],
    ids=["encode_mask", "decode_derivative", "decode_minmax"],
)
def test_a_kernel_compiles_to_machine_code_for_it(kernel, types, constants) -> None:
    compiled = compiled_for_amd(kernel, types, constants)
    assembly = compiled.asm["amdgcn"]
    assert 'amdgcn_target "amdgcn-amd-amdhsa--gfx942"' in assembly
    assert re.findall(r"\.amdhsa_float_denorm_mode_32 (\d)", assembly) == ["3"]  # none is flushed
    assert compiled.asm["hsaco"][:4] == b"\x7fELF"


def test_products_and_sums_stay_apart_unless_they_may_be_one() -> None:
    """Pairs of them are told by this operation; a division of integers makes other ones."""
    constants = {"TYPE": 0, "BITS": 4, **READ}
    apart, fused = (
        compiled_for_amd(triton_minmax.decode_minmax, MINMAX, constants, fused=allowed)
        for allowed in (False, True)
    )
    assert "v_pk_fma_f32" not in apart.asm["amdgcn"]
    assert "v_pk_mul_f32" in apart.asm["amdgcn"]
    assert "v_pk_fma_f32" in fused.asm["amdgcn"]
