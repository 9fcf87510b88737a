"""Which dimension of each tensor in a batch runs over its examples, and cutting along it.

A batch is any nest of tensors: tuples, lists, mappings, dataclasses. Lists and tuples of numbers,
words or nests of them, and NumPy's arrays, are cut with the tensors where they have as many rows as
there are examples. What a cut does not name goes to every micro-batch unchanged.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daf.core.errors import DataError
from daf.torch_compat.autograd_graph import is_strided
from daf.torch_compat.pytree import map_nest, tensors_in_batch

_MOST_LOOKED_AT = 2048  # examples
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
        cut = self._mapped(batch, lambda each, dim: each.narrow(dim, start, stop - start))
        return _with_rows(cut, self.size(batch), lambda rows: rows[start:stop])

    def pick(self, batch: Any, examples: Sequence[int]) -> Any:
        """Return copies of some examples; of a batch cut by ``own`` as many of the first."""
        if self.own is not None:
            return self.own.take(batch, 0, len(examples))
        index = torch.tensor(examples)
        cut = self._mapped(batch, lambda each, dim: each.index_select(dim, index.to(each.device)))
        return _with_rows(cut, self.size(batch), partial(_picked, examples))

    def telling(self, batch: Any, count: int) -> list[int]:
        """Return so many examples, among which the sums of labels, masks and lengths differ most.

        Of three and more the last one is of the first one's class, where classes repeat.
        """
        size, cut = self.size(batch), self._cut(batch)
        if self.own is not None or count >= size:
            return [*range(min(count, size))]
        found, last = list[int](), size - 1
        for tensor, dim in sorted(cut, key=lambda pair: pair[0].is_floating_point()):
            rows = tensor.narrow(dim, 0, min(size, _MOST_LOOKED_AT))
            within = [each for each in range(rows.dim()) if each != dim]
            sums = (rows.sum(within) if within else rows).tolist()
            if not tensor.is_complex() and len({*sums}) > 1:
                found += [sums.index(min(sums)), sums.index(max(sums))]
                last = found[1] if len(found) == 2 else last
                if count > 2 and _is_of_classes(tensor):
                    alike = (i for i, each in enumerate(sums) if each == sums[found[0]])
                    last = next((i for i in alike if i != found[0]), last)
        others = dict.fromkeys(each for each in (*found, *range(size)) if each != last)
        return [*[*others][: count - 1], last]

    def classes(self, batch: Any) -> list[Tensor]:
        """Return the classes that examples share: two of one and another show couplings."""
        found = (each for each, _ in self._cut(batch) if _is_of_classes(each))
        return [each for each in found if len({*each.tolist()}) < len(each)]

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

    def _mapped(self, batch: Any, change: Callable[[Tensor, int], Tensor]) -> Any:
        dims = iter(self.dims)

        def cut(tensor: Tensor) -> Tensor:
            dim = next(dims, None)
            return tensor if dim is None else change(tensor, dim)

        return map_nest(Tensor, cut, batch)


WHOLE = BatchCut()
_ROWS = (list, tuple, np.ndarray)


def _with_rows(batch: Any, size: int, change: Callable[[Any], Any]) -> Any:
    """Return the batch with ``change`` of what holds a row for each of ``size`` examples."""
    return map_nest(_ROWS, partial(_cut_rows, size, change), batch)  # type: ignore[arg-type]


def _cut_rows(size: int, change: Callable[[Any], Any], rows: Any) -> Any:
    if isinstance(rows, np.ndarray):
        return change(rows) if rows.ndim and len(rows) == size else rows
    if type(rows) in _ROWS and len(rows) == size and not tensors_in_batch(rows):
        return change(rows)
    items = [_with_rows(each, size, change) for each in rows]
    if all(map(is_, items, rows)):
        return rows
    return rows._make(items) if hasattr(rows, "_make") else type(rows)(items)


def _picked(examples: Sequence[int], rows: Any) -> Any:
    if isinstance(rows, np.ndarray):
        return rows[list(examples)]
    return type(rows)(rows[each] for each in examples)


def _is_of_classes(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and not (tensor.is_floating_point() or tensor.is_complex())


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
