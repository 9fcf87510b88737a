"""Saves one byte for each number, where a proof has no room to save as plain PyTorch does.

Every number becomes the power of two next to it, by itself: whatever else lies in its batch. So
gradients are not the model's, yet the same operators make them of the same examples: parts add up
to the whole, or do not, as with plain PyTorch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from daf.codecs.layout import Layout, content_key, in_memory_order, is_dense, layout_of, overlaps
from daf.core.policy import Need
from daf.saved_tensors.ledger import Ledger, Source, Sources
from daf.saved_tensors.observation import Observation
from daf.torch_compat.autograd_graph import is_strided, saved_tensor_hooks

_CHUNK = 1 << 16  # elements at a time: what coding takes beside its result
_MOST_EXPONENT = 62


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Codes:
    """Sign and exponent of every number in memory order, 0 for 0: (elements,) int8."""

    content: Tensor
    source: Source  # whose address no other storage gets meanwhile
    layout: Layout  # of the first tensor that they are of


_Coded = tuple[_Codes, Layout, torch.Size]  # its numbers once, and the shape that repeats them


def terse_saves(external: Iterator[Tensor]) -> AbstractContextManager[None]:
    """Code what passes inside save, but for what lies in ``external`` tensors and stays anyway."""
    sources = Sources(Ledger())
    sources.begin_step(external)

    def pack(tensor: Tensor) -> Tensor | _Coded:
        if not _is_coded(tensor) or sources.is_external(tensor):
            return tensor
        once = _once(tensor)
        source, key = sources.of(tensor), content_key(once, tensor._version)
        if (codes := source.recall(key, _Codes)) is None:
            dense = once if is_dense(once) else once.contiguous()
            content = _in_chunks(_exponents, in_memory_order(dense), torch.int8)
            codes = _Codes(content, source, layout_of(dense))
            source.remember(key, codes)
        return codes, layout_of(once) if is_dense(once) else codes.layout, tensor.shape

    return saved_tensor_hooks(pack, _read)


def terse_bytes(found: Observation) -> int:
    """Return what a step saves so: a byte for each number, integers as they are.

    Two tensors are read at a time at most, each whole.
    """
    coded, kept = {}, {}
    for save in found.saves:
        if save.treatable and save.need is not Need.INTEGER:
            coded[save.storage, save.content] = save.elements
        else:
            kept[save.storage] = save.storage_bytes
    read = 2 * max((save.tensor_bytes for save in found.saves), default=0)
    return sum(coded.values()) + sum(kept.values()) + read


def _read(saved: Tensor | _Coded) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    codes, layout, shape = saved
    values = _in_chunks(_values, codes.content, layout.dtype)
    return values.as_strided(layout.shape, layout.stride).expand(shape)


def _is_coded(tensor: Tensor) -> bool:
    """Whether it may have a number for each example: of any strides, as parts have others."""
    is_plain = type(tensor) is Tensor and is_strided(tensor)
    is_number = is_plain and tensor.is_floating_point() and tensor.dim() > 0
    return is_number and not overlaps(_once(tensor))


def _once(tensor: Tensor) -> Tensor:
    """Return the tensor without repetitions: one of each that an expansion made."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = [size if stride else 1 for size, stride in steps]
    return tensor.detach().as_strided(sizes, tensor.stride())


def _in_chunks(change: Callable[[Tensor], Tensor], flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ``change`` makes of (elements,): of a dtype, a chunk at a time."""
    result = torch.empty_like(flat, dtype=dtype)
    for read, written in zip(torch.split(flat, _CHUNK), torch.split(result, _CHUNK), strict=True):
        written.copy_(change(read))
    return result


def _exponents(numbers: Tensor) -> Tensor:
    """Return numbers' signs and exponents, from 3 to 126 in magnitude; 0 for 0."""
    mantissa, exponent = torch.frexp(numbers.float())
    exponent = exponent.clamp_(1 - _MOST_EXPONENT, _MOST_EXPONENT).add_(64)
    return exponent.mul_(mantissa.sign().int())


def _values(codes: Tensor) -> Tensor:
    return torch.ldexp(0.75 * codes.sign(), codes.abs().int() - 64)
