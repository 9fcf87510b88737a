"""The oracle, writing down what it is asked and what it answers, for ``native/main.cpp``."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

import numpy as np

from daf.errors import KernelError
from daf.kernels import ElementType, reference, tables, words_per_plane
from daf.kernels.elements import element_dtype

# As in native/cases.h.
OPERATIONS = tuple(
    f"{way}_{codec}"
    for codec in ("rotated", "minmax", "mask", "derivative", "integers")
    for way in ("encode", "decode")
)
PARAMETERS = (
    *("operation", "type", "bits", "rounds", "item_bytes", "predicate", "accumulate", "done"),
    *("low", "high", "count", "key", "base", "channels", "inner"),
)
SLOTS = (
    *("input", "headers", "mask", "scale", "shift", "table", "thresholds"),
    *("output", "output_headers"),
)
TYPE_OF = {element_dtype(element_type): element_type for element_type in ElementType}
Content = dict[str, np.ndarray | None]


class Recorder:
    """Stands in for ``daf.kernels.reference``: each call is computed there and becomes a case."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.case_count = 0

    # --- rotated and minmax -----------------------------------------------------------------

    def encode_rotated(self, source, bits, rounds, key, affine=None):
        code = reference.encode_rotated(source, bits, rounds, key, affine)
        self._write(
            "encode_rotated",
            _encoded(source, code, affine)
            | {"thresholds": tables.rotated_thresholds(bits)}
            | {"table": tables.rotated_levels(bits, bits)},
            **_shape(source, affine, bits=bits, rounds=rounds, key=key),
        )
        return code

    def decode_rotated(self, code, target, bits, rounds, key, affine=None):
        result, kept = (
            reference.decode_rotated(code, target, bits, rounds, key, affine),
            len(code[0]),
        )
        self._write(
            "decode_rotated",
            _decoded(code, target, affine, result) | {"table": tables.rotated_levels(bits, kept)},
            **_shape(result, affine, bits=kept, rounds=rounds, key=key),
            low=tables.rotated_level_factor(bits, kept),
        )
        return result

    def encode_minmax(self, source, bits, key, affine=None):
        code = reference.encode_minmax(source, bits, key, affine)
        content = _encoded(source, code, affine)
        self._write("encode_minmax", content, **_shape(source, affine, bits=bits, key=key))
        return code

    def decode_minmax(self, code, target, bits, affine=None):
        result = reference.decode_minmax(code, target, bits, affine)
        content = _decoded(code, target, affine, result)
        self._write("decode_minmax", content, **_shape(result, affine, bits=bits))
        return result

    # --- mask, derivative, integers ---------------------------------------------------------

    def encode_mask(self, source, predicate, low, high):
        words = reference.encode_mask(source, predicate, low, high)
        shape = _shape(source, predicate=int(predicate), low=low, high=high, bits=1)
        self._write("encode_mask", {"input": source, "output": words}, **shape)
        return words

    def decode_mask(self, words, count, off_value, on_value, element_type):
        result = reference.decode_mask(words, count, off_value, on_value, element_type)
        shape = _shape(result, low=off_value, high=on_value, bits=1)
        self._write("decode_mask", {"input": words, "output": result}, **shape)
        return result

    def encode_derivative(self, source, bits, borders):
        planes = reference.encode_derivative(source, bits, borders)
        content = {"input": source, "table": borders, "output": planes}
        if planes is None:
            content["output"] = _room(source, bits)
        shape = _shape(source, bits=bits, done=int(planes is not None))
        self._write("encode_derivative", content, **shape)
        return planes

    def decode_derivative(self, planes, count, levels, element_type):
        result = reference.decode_derivative(planes, count, levels, element_type)
        content = {"input": planes, "table": levels, "output": result}
        self._write("decode_derivative", content, **_shape(result, bits=len(planes)))
        return result

    def encode_integers(self, source, bits, base):
        shape = _integers(source, bits=bits, base=base)
        try:
            planes = reference.encode_integers(source, bits, base)
        except KernelError:
            content = {"input": source, "output": _room(source, bits)}
            self._write("encode_integers", content, done=0, **shape)
            raise
        self._write("encode_integers", {"input": source, "output": planes}, **shape)
        return planes

    def decode_integers(self, planes, count, base, item_bytes):
        result = reference.decode_integers(planes, count, base, item_bytes)
        shape = _integers(result, bits=len(planes), base=base)
        self._write("decode_integers", {"input": planes, "output": result}, **shape)
        return result

    # --- the file ---------------------------------------------------------------------------

    def _write(self, operation: str, content: Content, **given: Any) -> None:
        accumulates = content.get("before") is not None
        given |= {"operation": OPERATIONS.index(operation), "accumulate": int(accumulates)}
        values = [given.get(name, int(name == "done")) for name in PARAMETERS]
        name = (
            f"case {self.case_count}, {operation}, {given['bits']} bits, {given['count']} elements"
        )
        self._write_bytes(name.encode())
        self._file.write(struct.pack("<8I2f5Q", *values))
        for slot in (*SLOTS, "before"):
            array = content.get(slot)
            self._write_bytes(b"" if array is None else array.tobytes())
        self.case_count += 1

    def _write_bytes(self, content: bytes) -> None:
        self._file.write(struct.pack("<Q", len(content)) + content)


def _affine_rows(affine: reference.Affine | None) -> Content:
    return {} if affine is None else {"scale": affine.scale, "shift": affine.shift}


def _encoded(source, code: reference.Code, affine) -> Content:
    written: Content = {"input": source, "output": code.planes, "output_headers": code.headers}
    return written | _affine_rows(affine)


def _decoded(code: reference.Code, target: reference.Target, affine, result) -> Content:
    read: Content = {"input": code.planes, "headers": code.headers, "mask": target.mask}
    written: Content = {"output": result, "before": target.accumulate_onto}
    return read | written | _affine_rows(affine)


def _shape(elements: np.ndarray, affine: reference.Affine | None = None, **more: Any) -> Any:
    rows = {} if affine is None else {"channels": len(affine.scale), "inner": affine.inner}
    return {"type": int(TYPE_OF[elements.dtype]), "count": len(elements)} | rows | more


def _room(source: np.ndarray, bits: int) -> np.ndarray:
    """For planes that will be worthless: a kernel that refuses may have begun to write."""
    return np.zeros((bits, words_per_plane(len(source))), np.uint32)


def _integers(items: np.ndarray, bits: int, base: int) -> Any:
    size = {"count": len(items), "item_bytes": items.itemsize}
    return size | {"bits": bits, "base": base & (2**64 - 1)}
