"""Bytes that operators read and write: PyTorch's by their tensors, ours by what kernels are given.

Every tensor that an operator of PyTorch is given or returns counts once, whatever
it does inside; views and fresh memory count nothing. A kernel of ours counts its
elements, planes, headers, masks and what it writes in passing. Caches are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from daf.core.code_format import BLOCK_ELEMENTS, HEADER_BYTES_PER_BLOCK, ElementType, block_count
from daf.kernels import Emission, NormGradient, PageFields, RowGradient
from daf.kernels.cpu import channel_norm, paged, reductions, row_norm

_FLOAT_BYTES, _DOUBLE_BYTES = 4, 8
_FRESH = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """One operator of PyTorch; PyTorch calls this."""
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if not _is_view(func) and func.overloadpacket.__name__ not in _FRESH:
            self.nbytes += sum(map(_extent_bytes, _distinct((args, keywords, result))))
        return result


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count everything inside, on this thread and in its backward passes."""
    traffic = Traffic()
    with ExitStack() as stack:
        for module, name, rule in _RULES:
            stack.enter_context(_counted(traffic, module, name, rule))
        stack.enter_context(traffic)
        yield traffic


def _is_view(func: Any) -> bool:
    aliases = (returned.alias_info for returned in func._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def _distinct(values: Any) -> Iterator[Tensor]:
    seen = set()
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and (key := (value.data_ptr(), value.shape)) not in seen:
            seen.add(key)
            yield value


def _extent_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that exist: an expanded one counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


# --- kernels of ours ------------------------------------------------------------------------

Rule = Callable[[Mapping[str, Any]], int]


@contextmanager
def _counted(traffic: Traffic, module: Any, name: str, rule: Rule) -> Iterator[None]:
    function = getattr(module, name)
    names = signature(function)

    def count(*args: Any, **keywords: Any) -> Any:
        given = names.bind(*args, **keywords)
        given.apply_defaults()
        traffic.nbytes += rule(given.arguments)
        return function(*args, **keywords)

    setattr(module, name, count)
    try:
        yield
    finally:
        setattr(module, name, function)


def _element_bytes(given: Mapping[str, Any]) -> int:
    return _FLOAT_BYTES if given["element_type"] is ElementType.FLOAT32 else 2


def _plane_bytes(count: int, planes: int) -> int:
    return block_count(count) * BLOCK_ELEMENTS // 8 * planes


def _code_bytes(fields: PageFields, count: int) -> int:
    return _plane_bytes(count, fields.kept) + HEADER_BYTES_PER_BLOCK * block_count(count)


def _emission_bytes(emission: Emission | None, count: int) -> int:
    if emission is None:
        return 0
    passes = 1 + (emission.addend_pointer != 0)
    return passes * _FLOAT_BYTES * count + (_plane_bytes(count, 1) if emission.mask else 0)


def _encode(given: Mapping[str, Any]) -> int:
    fields = given["fields"]
    count: int = fields.elements
    read = count * _element_bytes(given)
    return read + _code_bytes(fields, count) + _emission_bytes(given["emission"], count)


def _decode(given: Mapping[str, Any]) -> int:
    fields, blocks = given["fields"], given["blocks"]
    count: int = fields.elements
    if blocks is not None:
        count = min(count, blocks[1] * BLOCK_ELEMENTS) - blocks[0] * BLOCK_ELEMENTS
    passes = 2 if given["accumulate"] else 1
    mask = _plane_bytes(count, 1) if given["mask"] else 0
    return passes * count * _element_bytes(given) + _code_bytes(fields, count) + mask


def _planes_only(given: Mapping[str, Any]) -> int:
    fields = given["fields"]
    count: int = fields.elements
    return count * _element_bytes(given) + _plane_bytes(count, fields.bits)


def _values(given: Mapping[str, Any]) -> tuple[int, int]:
    """(elements, bytes) of where a backward pass takes its values from."""
    fields = given.get("fields")
    if fields is None:
        return given["count"], _FLOAT_BYTES * given["count"]
    return fields.elements, _code_bytes(fields, fields.elements)


def _backward(given: Mapping[str, Any]) -> int:
    count, values = _values(given)
    gradient: NormGradient | RowGradient = given["gradient"]
    passes = 1 + (gradient.destination_pointer != 0)
    masked = isinstance(gradient, NormGradient) and gradient.mask is not None
    return passes * _FLOAT_BYTES * count + values + (_plane_bytes(count, 1) if masked else 0)


def _emit(given: Mapping[str, Any]) -> int:
    count: int = given["count"]
    return _FLOAT_BYTES * count + _emission_bytes(given["emission"], count)


def _measure(given: Mapping[str, Any]) -> int:
    return int(given["count"]) * _element_bytes(given)


def _statistics(given: Mapping[str, Any]) -> int:
    """Two sums to two numbers of each channel; running ones are read and written."""
    following = 0 if given["running"] is None else 2 * 2 * _FLOAT_BYTES
    return int(given["sums"].channels) * (2 * (_DOUBLE_BYTES + _FLOAT_BYTES) + following)


def _factors(given: Mapping[str, Any]) -> int:
    """Two sums, and all vectors that are there."""
    channels: int = given["channels"]
    vectors: int = sum(address != 0 for address in given["factors"][2:])
    return channels * (2 * _DOUBLE_BYTES + vectors * _FLOAT_BYTES)


_RULES: tuple[tuple[Any, str, Rule], ...] = (
    *((paged, f"encode_{codec}", _encode) for codec in ("rotated", "minmax")),
    *((paged, f"decode_{codec}", _decode) for codec in ("rotated", "minmax")),
    *(
        (paged, f"{way}_{codec}", _planes_only)
        for codec in ("mask", "derivative")
        for way in ("encode", "decode")
    ),
    *(
        (module, f"backward_{source}", _backward)
        for module in (channel_norm, row_norm)
        for source in ("kept", "rotated", "minmax")
    ),
    (channel_norm, "emit", _emit),
    (channel_norm, "statistics_of_sums", _statistics),
    (channel_norm, "factors_of_sums", _factors),
    (reductions, "measure_sums", _measure),
)
