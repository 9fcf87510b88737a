"""The graph of values: which aten operation made each tensor of a forward pass, from what.

A value is the content of a whole storage between two writes. Views are the same value in another
geometry. An operation that writes in place makes a new value, as its functional form would.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.codecs.layout import is_dense
from daf.torch_compat.autograd_graph import StorageReference, bytes_of, is_strided
from daf.torch_compat.operator_mode import DispatchMode
from daf.torch_compat.pytree import map_nest, tensors_in_batch


class Geometry(NamedTuple):
    """Where a tensor lies in its storage; offset and strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """Return a strided tensor's geometry; of equal ones, the same object."""
        return _geometry(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def within(self, whole: Tensor) -> Tensor:
        """Return the tensor of this geometry in the storage of ``whole``."""
        if self == Geometry.of(whole):
            return whole
        if whole.dtype != self.dtype:
            whole = torch.empty(0, dtype=self.dtype).set_(whole.untyped_storage())
        return torch.as_strided(whole, self.shape, self.stride, self.offset)


@lru_cache(maxsize=4096)
def _geometry(shape: torch.Size, stride: Any, offset: int, dtype: torch.dtype) -> Geometry:
    return Geometry(tuple(shape), stride, int(offset), dtype)


class Operation(NamedTuple):
    """One call of an aten operation; ``nest``: arguments and keywords, operands for tensors."""

    function: Callable[..., Any]
    nest: Any
    made_bytes: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class Value:
    """The content of a storage; ``operation``: what made it, None where that is not known."""

    address: int
    nbytes: int
    operation: Operation | None = None
    output: int = 0
    geometry: Geometry | None = None  # of the operation's result
    readers: list[weakref.ref[Any]] = field(default_factory=list)  # that need it whatever comes

    def before_write(self) -> None:
        """Let readers copy what they need, since the storage is about to change."""
        for reference in self.readers:
            if (reader := reference()) is not None:
                reader.copy()
        self.readers.clear()


class Operand(NamedTuple):
    """A tensor that an operation read: a value in some geometry."""

    value: Value
    geometry: Geometry
    tensor: weakref.ref[Tensor]


class ValueRecorder(DispatchMode):
    """Records the values of what runs inside, on this thread; ``own_ms``: the time that takes.

    ``is_paused``: what runs is not the program's, and makes nothing that recipes may need.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: dict[int, tuple[StorageReference, Value]] = {}
        self.own_ms, self.is_paused = 0.0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start_s, keywords = time.perf_counter(), kwargs or {}
        if self.is_paused:
            return func(*args, **keywords)
        is_mutable = func._schema.is_mutable or (func._schema.name in _UPDATING and args[5])
        for each in _written(func, args, keywords) if is_mutable else ():
            if is_strided(each):
                self.value_of(each).before_write()
        begun_s = time.perf_counter()
        result = func(*args, **keywords)
        ended_s = time.perf_counter()
        self._note(func, args, keywords, result)
        self.own_ms += 1000.0 * (time.perf_counter() - ended_s + begun_s - start_s)
        return result

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value that a strided tensor shows now."""
        storage = tensor.untyped_storage()
        if (known := self._values.get(storage._cdata)) is None:
            return self._put(storage, Value(storage._cdata, storage.nbytes()))
        return known[1]

    def is_current(self, value: Value) -> bool:
        """True if the value's storage still shows it."""
        known = self._values.get(value.address)
        return known is not None and known[1] is value

    def operand(self, tensor: Tensor) -> Operand:
        """Return the operand that a strided tensor is now."""
        return Operand(self.value_of(tensor), Geometry.of(tensor), weakref.ref(tensor))

    def _put(self, storage: torch.UntypedStorage, value: Value) -> Value:
        # The weak reference reserves the address: an equal one means the same storage.
        self._values[storage._cdata] = (StorageReference(storage), value)
        return value

    def _note(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        maker = _maker(function)
        if maker is _VIEW:
            return
        made = result if isinstance(result, (tuple, list)) else (result,)
        nest: Any = (arguments, keywords)
        if function is _BATCH_NORM and arguments[5]:
            # Its statistics, which backward keeps, are not made again: running ones would be
            # updated once more.
            maker, nest, made = normalised, ((*arguments[:3], *made[1:]), {}), made[:1]
            self._forget(_written(function, arguments, keywords))
        if maker is None or not all(map(_is_plain, tensors_in_batch(nest))):
            self._forget((*tensors_in_batch(result), *_written(function, arguments, keywords)))
            return
        operands: Any = map_nest(Tensor, self.operand, nest)
        operation = Operation(maker, operands, sum(map(bytes_of, tensors_in_batch(made))))
        for place, each in enumerate(made):
            if isinstance(each, Tensor) and is_strided(each):
                storage = each.untyped_storage()
                value = self._put(storage, Value(storage._cdata, storage.nbytes()))
                if each.nbytes == value.nbytes and is_dense(each):
                    value.operation, value.output = operation, place
                    value.geometry = Geometry.of(each)

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for each in filter(is_strided, tensors):
            self._values.pop(each.untyped_storage()._cdata, None)


# In training they write running statistics (arguments 3 and 4), of which no schema tells.
_UPDATING = {f"aten::{name}_batch_norm" for name in ("native", "cudnn", "miopen")}
_BATCH_NORM = torch.ops.aten.native_batch_norm.default


def normalised(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, inverse_deviation: Tensor
) -> Tensor:
    """Return what ``native_batch_norm`` in training makes of ``x``, whose statistics are known.

    In inference it multiplies by one number a channel and adds another as in training
    (``batch_norm_cpu_collect_linear_and_constant_terms``), to the same bits where the number is the
    same: gamma holds it, for a variance of one.
    """
    scale = inverse_deviation if gamma is None else inverse_deviation * gamma
    variance = torch.ones_like(scale)
    return torch.native_batch_norm(x, scale, beta, mean, variance, False, 0.0, 0.0)[0]


def _is_plain(tensor: Tensor) -> bool:
    is_ordinary = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_inference()
    return is_ordinary and is_strided(tensor) and not tensor.is_quantized


def _written(function: Any, arguments: Any, keywords: Any) -> Iterator[Tensor]:
    for at, name in _written_places(function):
        yield from tensors_in_batch(arguments[at] if at < len(arguments) else keywords.get(name))


@lru_cache(maxsize=4096)
def _written_places(function: Any) -> list[tuple[int, str]]:
    if function._schema.name in _UPDATING:
        return [(3, "running_mean"), (4, "running_var")]
    places = enumerate(function._schema.arguments)
    return [(at, e.name) for at, e in places if e.alias_info is not None and e.alias_info.is_write]


# Beside pointwise operations and reductions: what takes no longer than its bytes do to write. All
# of a result must be defined, which is not so everywhere (CTC's table).
_NAMES = """
_fused_rms_norm _log_softmax _prelu_kernel _softmax _to_copy arange avg_pool2d cat clone copy
constant_pad_nd cumsum embedding flip full full_like gather glu hardswish index index_select
max_pool2d_with_indices native_batch_norm native_group_norm native_layer_norm new_full new_ones
new_zeros ones ones_like pixel_shuffle pixel_unshuffle prelu repeat roll scatter select_scatter
slice_scatter stack tril triu upsample_bilinear2d upsample_nearest2d zeros zeros_like
"""
_CHEAP = frozenset(_NAMES.split())
# torch 2.9 has no tag for reductions; there recipes end at them.
_CHEAP_TAGS = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}
# Their results are undefined, or somebody else's.
_UNDEFINED = ("empty", "new_empty", "resize", "set_", "_reshape_alias", "_to_copy.out")
_VIEW = object()  # an operation that returns its input's memory, or writes nothing new


@lru_cache(maxsize=4096)
def _maker(function: Any) -> Any | None:
    """Return what makes an operation's value in new memory cheaply, ``_VIEW``, or None.

    Of one that writes its first argument alone, that is the overload which returns what it writes.
    """
    schema = function._schema
    aliases = [each.alias_info for each in (*schema.arguments, *schema.returns) if each.alias_info]
    name = schema.name.partition("::")[2]
    is_known = function.namespace == "aten" and not name.startswith(_UNDEFINED)
    if not is_known or torch.Tag.nondeterministic_seeded in function.tags:
        return None
    if not aliases:
        return function if _is_cheap(function) else None
    if not any(each.is_write for each in aliases):
        return _VIEW
    written = [each for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    if not name.endswith("_") or written != schema.arguments[:1]:
        return None
    found = _twin(function, name.removesuffix("_"))
    if found is None or torch.Tag.nondeterministic_seeded in found.tags or not _is_cheap(found):
        return None
    return found


@lru_cache(maxsize=4096)
def in_place(function: Any) -> Any | None:
    """Return the overload that writes an operation's result over its first argument, or None."""
    schema = getattr(function, "_schema", None)
    return None if schema is None else _twin(function, schema.name.partition("::")[2] + "_")


def _twin(function: Any, name: str) -> Any | None:
    """Return the aten overload of another name that takes the same arguments, or None."""
    found = getattr(getattr(torch.ops.aten, name, None), function._overloadname, None)
    if found is None:
        return None
    names = [[each.name for each in one._schema.arguments] for one in (found, function)]
    return found if names[0] == names[1] else None


def _is_cheap(function: Any) -> bool:
    """True if an operation takes no longer than what it writes does to write."""
    name = function._schema.name.partition("::")[2]
    return name in _CHEAP or not _CHEAP_TAGS.isdisjoint(function.tags)
