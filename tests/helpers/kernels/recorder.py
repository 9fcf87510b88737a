"""The oracle, writing down what it is asked and what it answers, for ``native/main.cpp``."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from reference import channel_norm as reference_norm
from reference import codecs as reference
from reference import row_norm as reference_rows
from reference.elements import element_dtype, widen_bfloat16

from daf.core import code_tables
from daf.core.code_format import ElementType, words_per_plane
from daf.core.errors import KernelError

# As in native/cases.h.
OPERATIONS = (
    *(
        f"{way}_{codec}"
        for codec in ("rotated", "minmax", "steps", "mask", "derivative", "integers")
        for way in ("encode", "decode")
    ),
    *("emit", "sum_gradient", "write_gradient", "emit_rows", "row_gradient"),
)
CODECS = ("rotated", "minmax", "kept")
PARAMETERS = (
    *("operation", "type", "bits", "item_bytes", "predicate", "accumulate", "done"),
    *("low", "high", "count", "key", "base", "channels", "inner"),
    *("second_channels", "second_inner", "codec", "centred", "epsilon"),
)
SLOTS = (
    *("input", "headers", "mask", "scale", "shift", "table", "thresholds", "gradient"),
    *("second_scale", "second_shift", "third_scale", "third_shift"),
    *("output", "output_headers", "result", "result_mask", "sums", "products"),
)
TYPE_OF = {element_dtype(element_type): element_type for element_type in ElementType}
Content = dict[str, np.ndarray | None]


def _is_finite(headers: np.ndarray | None) -> bool:
    """True unless a block of values holds one that is not finite."""
    return headers is None or bool(np.isfinite(widen_bfloat16(headers)).all())


class Recorder:
    """Stands in for ``reference.codecs``: each call is computed there and becomes a case."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.case_count = 0

    # --- rotated and minmax -----------------------------------------------------------------

    def encode_rotated(self, source, bits, key, affine=None):
        code = reference.encode_rotated(source, bits, key, affine)
        self._write(
            "encode_rotated",
            _encoded(source, code, affine)
            | {"thresholds": code_tables.rotated_thresholds(bits)}
            | {"table": code_tables.rotated_levels(bits, bits)},
            **_shape(source, affine, bits=bits, key=key),
        )
        return code

    def decode_rotated(self, code, target, bits, key, affine=None):
        result, kept = (reference.decode_rotated(code, target, bits, key, affine), len(code[0]))
        self._write(
            "decode_rotated",
            _decoded(code, target, affine, result)
            | {"table": code_tables.rotated_levels(bits, kept)},
            **_shape(result, affine, bits=kept, key=key),
            low=code_tables.rotated_level_factor(bits, kept),
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

    def encode_steps(self, source, bits, key, affine=None):
        planes = reference.encode_steps(source, bits, key, affine)
        content = {"input": source, "output": planes, **_affine_rows(affine)}
        self._write("encode_steps", content, **_shape(source, affine, bits=bits, key=key))
        return planes

    def decode_steps(self, planes, target, affine=None):
        result = reference.decode_steps(planes, target, affine)
        content = {"input": planes, "output": result, **_affine_rows(affine)}
        self._write("decode_steps", content, **_shape(result, affine, bits=len(planes)))
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

    def encode_derivative(self, source, bits, key, lines):
        planes = reference.encode_derivative(source, bits, key, lines)
        content = {"input": source, "table": lines, "output": planes}
        if planes is None:
            content["output"] = _room(source, bits)
        shape = _shape(source, bits=bits, key=key, done=int(planes is not None))
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

    # --- normalisations ---------------------------------------------------------------------

    def emit(self, norm, codec, bits, addend, rectify):
        values = norm.before.apply(norm.x, 0)
        emitted = reference_norm.emit(values, norm.result, addend, rectify)
        content = {"gradient": addend, "result": emitted.result, "result_mask": emitted.mask}
        self._write(
            "emit",
            _coded(norm.x, codec, bits, norm.key, norm.before) | content | _second(norm.result),
            **_shape(norm.x, norm.before, bits=bits, key=norm.key),
            **_second_shape(norm.result, codec),
        )

    def gradients(self, norm, codec, bits, mask):
        """Both passes of backward."""
        values, content, given = _values(norm, codec, bits)
        given |= _second_shape(norm.result, codec)
        channels, inner = len(norm.result.scale), norm.result.inner
        taken = reference_norm.gradient_sums(values, norm.gradient, mask, channels, inner)
        content |= {"gradient": norm.gradient, "mask": mask}
        written = {"result": reference_norm.masked(norm.gradient, mask)}
        summed = {"sums": taken.sums, "products": taken.squares}
        self._write("sum_gradient", content | written | summed, **given)
        factors = (norm.of_value, norm.result)
        found = reference_norm.input_gradient(values, norm.gradient, mask, *factors)
        third = {"third_scale": norm.of_value.scale, "third_shift": norm.of_value.shift}
        content |= _second(norm.result) | third | {"result": found}
        self._write("write_gradient", content, **given)

    def emit_rows(self, norm, codec, bits):
        affine = reference_rows.row_affine(norm.x, norm.length, norm.epsilon, centred=norm.centred)
        emitted = reference_norm.emit(affine.apply(norm.x, 0), norm.result, None, rectify=False)
        content = _coded(norm.x, codec, bits, norm.key, affine) | _second(norm.result)
        del content["scale"], content["shift"]
        content |= {"result": emitted.result, "sums": affine.scale, "products": affine.shift}
        given = _shape(norm.x, bits=bits, key=norm.key, inner=norm.length)
        given |= _second_shape(norm.result, codec)
        self._write("emit_rows", content, **given, **norm.moments)

    def row_gradients(self, norm, codec, bits, gamma):
        before = reference_rows.row_affine(norm.x, norm.length, norm.epsilon, centred=norm.centred)
        values, content, given = _values(norm._replace(before=before), codec, bits)
        found = reference_rows.row_gradients(
            values, norm.gradient, before.scale, gamma, centred=norm.centred
        )
        content |= {"gradient": norm.gradient, "second_scale": gamma, "third_scale": before.scale}
        content |= {"result": found.x, "sums": found.beta, "products": found.gamma}
        given |= {"second_inner": norm.length, "codec": CODECS.index(codec)}
        self._write("row_gradient", content, **given, **norm.moments)

    # --- the file ---------------------------------------------------------------------------

    def _write(self, operation: str, content: Content, **given: Any) -> None:
        accumulates = content.get("before") is not None
        given |= {"operation": OPERATIONS.index(operation), "accumulate": int(accumulates)}
        given.setdefault("done", int(_is_finite(content.get("output_headers"))))
        values = [given.get(name, 0) for name in PARAMETERS]
        name = (
            f"case {self.case_count}, {operation}, {given['bits']} bits, {given['count']} elements"
        )
        self._write_bytes(name.encode())
        self._file.write(struct.pack("<6IQ2f5Q2Q2Id", *values))
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


class Norm(NamedTuple):
    """A normalisation of ``x``: the affine to its values and to its result, and a gradient.

    ``of_value`` is a factor of backward's second pass. Of rows, ``before`` is measured.
    """

    x: np.ndarray
    before: reference.Affine | None
    result: reference.Affine
    gradient: np.ndarray
    key: int
    of_value: reference.Affine | None = None
    length: int = 0
    centred: bool = True
    epsilon: float = 1e-5

    @property
    def moments(self) -> Any:
        return {"centred": int(self.centred), "epsilon": self.epsilon}


def _coded(x, codec: str, bits: int, key: int, affine: reference.Affine) -> Content:
    """What an encoder of that codec reads and writes."""
    if codec == "kept":
        return {"input": x} | _affine_rows(affine)
    if codec == "minmax":
        return _encoded(x, reference.encode_minmax(x, bits, key, affine), affine)
    written = _encoded(x, reference.encode_rotated(x, bits, key, affine), affine)
    thresholds, levels = (
        code_tables.rotated_thresholds(bits),
        code_tables.rotated_levels(bits, bits),
    )
    return written | {"thresholds": thresholds, "table": levels}


def _values(norm: Norm, codec: str, bits: int) -> tuple[np.ndarray, Content, Any]:
    """Where backward's values come from: they, what is read for them, and its parameters."""
    target = reference.Target(len(norm.x))
    given = _shape(norm.x, bits=bits, key=norm.key)
    if codec == "kept":
        content = {"input": norm.x} | _affine_rows(norm.before)
        shape = {"channels": len(norm.before.scale), "inner": norm.before.inner}
        return norm.before.apply(norm.x, 0), content, given | shape
    if codec == "minmax":
        code = reference.encode_minmax(norm.x, bits, norm.key, norm.before)
        values = reference.decode_minmax(code, target, bits)
        return values, {"input": code.planes, "headers": code.headers}, given
    code = reference.encode_rotated(norm.x, bits, norm.key, norm.before)
    values = reference.decode_rotated(code, target, bits, norm.key)
    content = {"input": code.planes, "headers": code.headers}
    table = {"table": code_tables.rotated_levels(bits, bits)}
    return values, content | table, given | {"low": code_tables.rotated_level_factor(bits, bits)}


def _second(affine: reference.Affine) -> Content:
    return {"second_scale": affine.scale, "second_shift": affine.shift}


def _second_shape(affine: reference.Affine, codec: str) -> Any:
    shape = {"second_channels": len(affine.scale), "second_inner": affine.inner}
    return shape | {"codec": CODECS.index(codec)}
