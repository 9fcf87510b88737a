"""Element types of the oracle: float32, float16, and bf16 carried as uint16 bit patterns."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from daf.core.code_format import ElementType
from daf.core.errors import KernelError

Elements: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float32]
Planes: TypeAlias = NDArray[np.uint32]
Headers: TypeAlias = NDArray[np.uint16]

_DTYPES: dict[ElementType, np.dtype[Any]] = {
    ElementType.FLOAT32: np.dtype(np.float32),
    ElementType.BFLOAT16: np.dtype(np.uint16),
    ElementType.FLOAT16: np.dtype(np.float16),
}
_NAN_PATTERNS = {2: 0x7E00, 4: 0x7FC00000}


def element_dtype(element_type: ElementType) -> np.dtype[Any]:
    """Return the NumPy type that carries an element type."""
    return _DTYPES[element_type]


def widen(elements: Elements) -> Floats:
    """Return exact float32 values; KernelError if the array is not float32, float16 or uint16."""
    if elements.dtype not in _DTYPES.values():
        raise KernelError(f"asked for elements of {elements.dtype}; float32, float16, uint16 exist")
    if elements.dtype == np.uint16:
        return widen_bfloat16(elements)
    return elements.astype(np.float32)


def widen_bfloat16(patterns: NDArray[np.uint16]) -> Floats:
    """Convert bf16 bit patterns to the float32 numbers they stand for."""
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: Floats, element_type: ElementType) -> Elements:
    """Round to nearest even into an element type; NaN becomes the canonical one."""
    if element_type is ElementType.BFLOAT16:
        return np.where(np.isnan(values), np.uint16(0x7FC0), _round_bits(_bits(values)))
    result: Elements = values.astype(_DTYPES[element_type])
    pattern = _NAN_PATTERNS[result.itemsize]
    result.view(f"u{result.itemsize}")[np.isnan(result)] = pattern
    return result


def canonical(values: NDArray[np.floating[Any]]) -> Floats:
    """Round to float32; NaN becomes the canonical one."""
    result: Floats = narrow(values.astype(np.float32), ElementType.FLOAT32)
    return result


def bfloat16_nearest(values: Floats) -> NDArray[np.uint16]:
    """Round to nearest even; -0 becomes +0; too large becomes infinite."""
    return _round_bits(_bits(values + np.float32(0)))


def bfloat16_floor(values: Floats) -> NDArray[np.uint16]:
    """Return the greatest bf16 not above; the input is never -0."""
    bits = _bits(values)
    grow = np.where(values < 0, np.uint32(0xFFFF), np.uint32(0))
    return ((bits + grow) >> np.uint32(16)).astype(np.uint16)


def bfloat16_ceiling(values: Floats) -> NDArray[np.uint16]:
    """Return the least bf16 not below, of numbers from +0 upward."""
    return ((_bits(values) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def _bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _round_bits(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
