"""Which dimension of each tensor in a batch runs over its examples, and cutting along it.

A batch is any nest of tensors: tuples, lists, mappings, dataclasses. Lists and tuples of numbers,
words or nests of them, and NumPy's arrays, are cut with the tensors where they have as many rows as
there are examples. What a cut does not name goes to every micro-batch unchanged.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daf.core.errors import DataError
from daf.kernels.devices import is_read_freely
from daf.torch_compat.autograd_graph import is_strided
from daf.torch_compat.pytree import map_nest, tensors_in_batch

# Examples; elements that are compared, of large rows those of a corner of so many a side.
_MOST_LOOKED_AT, _MOST_COMPARED, _CORNER = 2048, 2**17, 32
BatchDim = int | Sequence[int | None] | Mapping[Any, int | None] | None


class BatchSplit(NamedTuple):
    """How to cut a batch of one's own, for ``Session(split=...)``.

    ``count(batch)`` returns its examples; ``take(batch, start, stop)`` a batch of [start, stop).
    """

    count: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]


@dataclass(frozen=True, slots=True)
class BatchCut:
    """The dimension of examples of every tensor in a batch, in order; None: it is not cut.

    Without any, the whole batch counts as one example. ``least``: the fewest examples that a part
    may have. ``own``: the user's way of cutting, in place of dimensions.
    """

    dims: tuple[int | None, ...] = ()
    least: int = 1
    own: BatchSplit | None = None

    def size(self, batch: Any) -> int:
        """Return the number of examples in a batch."""
        if self.own is not None:
            return self.own.count(batch)
        for tensor, dim in zip(tensors_in_batch(batch), self.dims, strict=False):
            if dim is not None:
                return tensor.shape[dim]
        return 1

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Return examples ``start`` to ``stop``, in the same structure; tensors are views."""
        if self.own is not None:
            return self.own.take(batch, start, stop)
        cut = self.rows(batch).changed(batch, lambda rows: rows[start:stop])
        return self._mapped(batch, cut, lambda each, dim: each.narrow(dim, start, stop - start))

    def pick(self, batch: Any, examples: Sequence[int]) -> Any:
        """Return copies of some examples; of a batch cut by ``own`` as many of the first."""
        if self.own is not None:
            return self.own.take(batch, 0, len(examples))
        index = torch.tensor(examples)
        cut = self.rows(batch).changed(batch, lambda rows: _picked(rows, examples))
        return self._mapped(
            batch, cut, lambda each, dim: each.index_select(dim, index.to(each.device))
        )

    def telling(self, batch: Any, count: int) -> list[int]:
        """Return so many examples, among which the sums of labels, masks and lengths differ most.

        The last is most like the second, of its class if there are more: the first may not count.
        """
        size, cut = self.size(batch), self._cut(batch)
        if self.own is not None or count >= size:
            return [*range(min(count, size))]
        found, seen = list[int](), list[Tensor]()
        for tensor, dim in sorted(cut, key=lambda pair: pair[0].is_floating_point()):
            rows = tensor.narrow(dim, 0, min(size, _MOST_LOOKED_AT)).movedim(dim, 0)
            if tensor.is_complex() or _is_alike(rows, 0):
                continue
            within = [*range(1, rows.dim())]
            sums = (rows.sum(within) if within else rows).double()  # no copy of large rows
            least, most = int(sums.argmin()), int(sums.argmax())
            if sums[least] == sums[most]:  # as those of classes in rows of one 1
                most = int(_distances(rows, rows[least], -1.0).argmax())
            found += [least, most]
            seen.append(rows)
        last = size - 1
        if seen:
            classes = (each for each in seen if each.dim() == 1 and not each.is_floating_point())
            rows = next(classes, seen[0])
            apart = _distances(rows, rows[found[1]], math.inf)
            apart[found[:2]] = math.inf
            last = int(apart.argmin())
        others = dict.fromkeys(each for each in (*found, *range(size)) if each != last)
        return [*[*others][: count - 1], last]

    def alike(self, batch: Any, among: Collection[int] | None = None) -> frozenset[int]:
        """Return the places of tensors that are one value for all examples; ``among``: of these."""
        every = enumerate(zip(tensors_in_batch(batch), self.dims, strict=False))
        asked = ((i, each, dim) for i, (each, dim) in every if among is None or i in among)
        read = (found for found in asked if is_read_freely(found[1]))  # no step waits for a device
        return frozenset(i for i, each, dim in read if dim is not None and _is_alike(each, dim))

    def _cut(self, batch: Any) -> list[tuple[Tensor, int]]:
        """Return the tensors that are cut, and where; labels, which usually come last, first."""
        every = [*zip(tensors_in_batch(batch), self.dims, strict=False)][::-1]
        return [(each.detach(), dim) for each, dim in every if dim is not None]

    def parts(self, batch: Any, micro_batch: int) -> list[Any]:
        """Return consecutive micro-batches of ``micro_batch`` examples, the last one shorter.

        Where it would have fewer than ``least``, all are made as equal as can be.
        """
        size = self.size(batch)
        if micro_batch >= size:
            return [batch]
        ends = [*range(0, size, micro_batch), size]
        if 0 < size % micro_batch < self.least:
            count = min(-(-size // micro_batch), max(1, size // self.least))
            ends = [size * index // count for index in range(count + 1)]
        return [self.take(batch, start, stop) for start, stop in pairwise(ends)]

    def _dims_of(self, batch: Any) -> dict[int, int]:
        """Return the dimension of each tensor that is cut, by identity."""
        every = zip(tensors_in_batch(batch), self.dims, strict=False)
        return {id(each): dim for each, dim in every if dim is not None}

    def rows(self, batch: Any) -> "Rows":
        """Return what tells rows of examples in a batch, or in what is left of it."""
        return Rows(self.size(batch), frozenset(self._dims_of(batch)))

    def _mapped(self, batch: Any, rows: Any, change: Callable[[Tensor, int], Tensor]) -> Any:
        """Return ``rows``, in which some of the batch's tensors are left, with these changed."""
        dims = self._dims_of(batch)

        def cut(tensor: Tensor) -> Tensor:
            dim = dims.get(id(tensor))
            return tensor if dim is None else change(tensor, dim)

        return map_nest(Tensor, cut, rows)


WHOLE = BatchCut()
_ROWS = (list, tuple, np.ndarray)


def _is_alike(tensor: Tensor, dim: int) -> bool:
    first, *others = tensor.unbind(dim)
    return all(torch.equal(first, each) for each in others)


def _distances(rows: Tensor, one: Tensor, beyond: float) -> Tensor:
    """Return (rows,): how far each is from one; ``beyond`` for those that are not compared."""
    one = one[(corner := tuple(slice(_CORNER) for _ in one.shape))]
    some = rows[(slice(max(4, _MOST_COMPARED // one.numel())), *corner)].double()
    near = (some - one.double()).abs().reshape(len(some), -1).sum(1)
    return torch.cat([near, near.new_full((len(rows) - len(near),), beyond)])


class Rows(NamedTuple):
    """How rows are known: there are ``size``, and none of the tensors that are ``cut`` in them."""

    size: int
    cut: frozenset[int]  # identities

    def are(self, found: Any) -> bool:
        """True for a list, tuple or array with a row for each example."""
        if isinstance(found, np.ndarray):
            return bool(found.ndim) and len(found) == self.size
        return type(found) in _ROWS and len(found) == self.size and not any(self.whole(found))

    def whole(self, nest: Any) -> list[bool]:
        """Return for each tensor in a nest if all examples are in it."""
        every = tensors_in_batch(nest)
        return [id(each) in self.cut or _length(each) == self.size for each in every]

    def changed(self, nest: Any, change: Callable[[Any], Any]) -> Any:
        """Return the nest with ``change`` of what holds a row for each example."""

        def cut(rows: Any) -> Any:
            if self.are(rows) or isinstance(rows, np.ndarray):
                return change(rows) if self.are(rows) else rows
            items = [self.changed(each, change) for each in rows]
            if all(map(is_, items, rows)):
                return rows
            return rows._make(items) if hasattr(rows, "_make") else type(rows)(items)

        return map_nest(_ROWS, cut, nest)  # type: ignore[arg-type]


def _picked(rows: Any, examples: Sequence[int]) -> Any:
    is_array = isinstance(rows, np.ndarray)
    return rows[[*examples]] if is_array else type(rows)(rows[each] for each in examples)


def uncut_rows(batch: Any, cut: BatchCut) -> str:
    """Return in words what has as many entries as there are examples and is not cut, or ""."""
    found = _uncut(batch, cut.rows(batch)) if cut.own is None else ()
    return next((f"a {type(each).__name__} with as many entries" for each in found), "")


def _uncut(value: Any, own: Rows) -> list[Any]:
    size = own.size
    parts: Any = ()
    if isinstance(value, (Tensor, np.ndarray)):  # by its first dimension it was tried both ways
        is_cut = id(value) in own.cut or value.shape[:1] == (size,)
        return [value] if size in value.shape and not is_cut else []
    if type(value) in _ROWS and len(value) == size:
        if len(whole := {*own.whole(value)}) > 1:
            return [value]
        parts = value if whole == {True} else ()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, Mapping) and value.keys() != {*range(size)}:
        parts = value.values()
    elif is_dataclass(value):
        parts = vars(value).values()
    elif not (isinstance(value, (str, bytes, type)) or callable(value)):
        inside = [value] if hasattr(value, "__len__") else getattr(value, "__dict__", {}).values()
        sized = (each for each in inside if hasattr(each, "__len__") and type(each) is not str)
        return [each for each in sized if size in getattr(each, "shape", (len(each),))]
    return [found for each in parts for found in _uncut(each, own)]


def possible_cuts(batch: Any, batch_dim: BatchDim = None) -> Iterator[BatchCut]:
    """Yield the ways in which a batch may be cut, the likeliest first; none if there is none.

    Without ``batch_dim`` examples are the first dimension that most tensors share. Then a tensor of
    that length by chance (weights of classes, a table) is left whole: floating-point vectors first,
    then all floating-point tensors but the largest. DataError: there is no such ``batch_dim``.
    """
    tensors = tensors_in_batch(batch)
    if batch_dim is not None:
        yield _named_cut(batch, tensors, batch_dim)
        return
    size = _common_size(tensors)
    if size < 2:
        return
    largest = max((each for each in tensors if _length(each) == size), key=Tensor.numel)

    def cut(keeps_whole: Callable[[Tensor], bool]) -> BatchCut:
        cuts = (_length(each) == size and not keeps_whole(each) for each in tensors)
        return BatchCut(tuple(0 if is_cut else None for is_cut in cuts))

    yield from dict.fromkeys(
        [
            cut(lambda _: False),
            cut(lambda each: each is not largest and each.is_floating_point() and each.dim() == 1),
            cut(lambda each: each is not largest and each.is_floating_point()),
        ]
    )


def _length(tensor: Tensor) -> int:
    """Return the first dimension; 0 where a tensor has none that can be cut."""
    return tensor.shape[0] if is_strided(tensor) and tensor.dim() else 0


def _common_size(tensors: Sequence[Tensor]) -> int:
    """Return the first dimension of most tensors, of the largest ones among equals; 0 for none."""
    elements: Counter[int] = Counter()
    for each in tensors:
        if _length(each):
            elements[_length(each)] += each.numel()
    counts = Counter(map(_length, tensors))
    return max(elements, key=lambda size: (counts[size], elements[size]), default=0)


def _named_cut(batch: Any, tensors: Sequence[Tensor], batch_dim: BatchDim) -> BatchCut:
    """Return the cut along the user's dimension: where a tensor lacks it, along its first."""
    if not isinstance(batch_dim, int):
        return BatchCut(tuple(_dims_by_field(batch, batch_dim)))
    sizes = [each.shape[batch_dim] for each in tensors if _length(each) and each.dim() > batch_dim]
    if not sizes:
        raise DataError(
            f"asked to cut the batch along dimension {batch_dim}; found no tensor with that many "
            "in it; try another batch_dim, or split=False"
        )
    size = sizes[0]

    def dim_of(tensor: Tensor) -> int | None:
        dims = range(-1 if not _length(tensor) else tensor.dim())
        return next((d for d in (batch_dim, 0) if d in dims and tensor.shape[d] == size), None)

    return BatchCut(tuple(map(dim_of, tensors)))


def _dims_by_field(batch: Any, batch_dim: Any) -> Iterator[int | None]:
    """Yield a dimension for every tensor: each field of the batch has the one named for it."""
    is_mapping = isinstance(batch, Mapping)
    if is_mapping != isinstance(batch_dim, Mapping) or len(batch) != len(batch_dim):
        raise DataError(
            f"asked for batch_dim={batch_dim!r}; found a {type(batch).__name__} of {len(batch)}; "
            "give one dimension (or None: whole) for each field, in the batch's own structure"
        )
    for field in batch if is_mapping else range(len(batch)):
        yield from (batch_dim[field] for _ in tensors_in_batch(batch[field]))
