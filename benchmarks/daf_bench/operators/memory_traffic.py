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
from daf.kernels import Codec
from daf.kernels.cpu import codecs
from daf.kernels.cpu.backend import CpuBackend
from daf.kernels.cpu.job import Job
from daf.kernels.normalisation import MaskedGradient

_FLOAT_BYTES, _DOUBLE_BYTES = 4, 8
_WITH_HEADERS = frozenset({Codec.ROTATED, Codec.MINMAX})
_COUNTED = _WITH_HEADERS | {Codec.MASK, Codec.DERIVATIVE}
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


def _element_bytes(job: Job) -> int:
    return _FLOAT_BYTES if job.element_type is ElementType.FLOAT32 else 2


def _plane_bytes(count: int, planes: int) -> int:
    return block_count(count) * BLOCK_ELEMENTS // 8 * planes


def _code_bytes(codec: Codec, job: Job, count: int) -> int:
    assert job.pages is not None
    headers = HEADER_BYTES_PER_BLOCK * block_count(count) if codec in _WITH_HEADERS else 0
    return _plane_bytes(count, job.pages.kept) + headers


def _emission_bytes(job: Job) -> int:
    emission = job.emission
    if emission is None:
        return 0
    passes = 1 + (emission.addend is not None)
    mask = _plane_bytes(job.elements, 1) if emission.mask is not None else 0
    return passes * _FLOAT_BYTES * job.elements + mask


def _encode(given: Mapping[str, Any]) -> int:
    codec, job = given["codec"], given["job"]
    if codec not in _COUNTED:
        return 0
    return _code_bytes(codec, job, job.elements) + _read(given)


def _decode(given: Mapping[str, Any]) -> int:
    codec, job = given["codec"], given["job"]
    if codec not in _COUNTED:
        return 0
    return _code_bytes(codec, job, _written_elements(job)) + _write(job)


def _read(given: Mapping[str, Any]) -> int:
    job: Job = given["job"]
    return job.elements * _element_bytes(job) + _emission_bytes(job)


def _copy(given: Mapping[str, Any]) -> int:
    """Bytes of a pass of backward; what is derived again is not counted."""
    job: Job = given["job"]
    if job.gradient is None and job.row_gradient is None:
        return 0
    return _FLOAT_BYTES * job.elements + _write(job)


def _write(job: Job) -> int:
    count, gradient = job.elements, job.gradient or job.row_gradient
    if gradient is not None:
        passes = 1 + (gradient.written is not None)
        masked = isinstance(gradient, MaskedGradient) and gradient.mask is not None
        return passes * _FLOAT_BYTES * count + (_plane_bytes(count, 1) if masked else 0)
    count = _written_elements(job)
    mask = _plane_bytes(count, 1) if job.mask else 0
    return (2 if job.accumulate else 1) * count * _element_bytes(job) + mask


def _written_elements(job: Job) -> int:
    if job.blocks is None:
        return job.elements
    first, last = job.blocks
    return min(job.elements, last * BLOCK_ELEMENTS) - first * BLOCK_ELEMENTS


def _statistics(given: Mapping[str, Any]) -> int:
    """Two sums to two numbers of each channel; running ones are read and written."""
    following = 0 if given["running"] is None else 2 * 2 * _FLOAT_BYTES
    return int(given["geometry"].channels) * (2 * (_DOUBLE_BYTES + _FLOAT_BYTES) + following)


def _factors(given: Mapping[str, Any]) -> int:
    """Two sums, and all vectors that are there."""
    channels: int = given["geometry"].channels
    vectors = 4 + sum(each is not None for each in (given["gamma"], *given["gradients"]))
    return channels * (2 * _DOUBLE_BYTES + vectors * _FLOAT_BYTES)


_RULES: tuple[tuple[Any, str, Rule], ...] = (
    (codecs, "encode", _encode),
    (codecs, "decode", _decode),
    (codecs, "read", _read),
    (codecs, "copy", _copy),
    (CpuBackend, "channel_statistics", _statistics),
    (CpuBackend, "gradient_factors", _factors),
)
