"""Leaves of the graph beside a model's parameters: a loss's own weights, a batch that asks for one.

Names do not find them all: a closure, a list, an object's attribute may hold them. The graph does.
"""

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor

from daf.torch_compat.autograd_graph import sequence_number


class OtherLeaves:
    """Gradients of leaves beside ``known`` ones, set aside: of ``others``, of those that are met.

    ``met``: what the losses led to. Leaves are held weakly: some live no longer than their graph.
    """

    def __init__(self, known: Iterable[Tensor] = (), others: Iterable[Tensor] = ()) -> None:
        self._known = {id(each) for each in known}
        self._taken: dict[int, tuple[ref[Tensor], Tensor | None]] = {}
        self.met: list[ref[Tensor]] = []
        self._begun_at, self.leads_beyond = sequence_number(), False
        for each in others:
            self._take(each)

    def set_aside(self, loss: Tensor) -> list[Tensor]:
        """Leave no gradient in those that backward of ``loss`` will reach and none before has."""
        leaves = [*self._leaves_of(loss)]
        self.met += [ref(each) for each in leaves if self._take(each)]
        return leaves

    def backward(self, loss: Tensor) -> None:
        """Go backward once ``set_aside``, and leave a graph that was there before to the user's.

        ``leads_beyond`` is True from then on: such a graph lets only one backward pass through.
        """
        leaves = self.set_aside(loss)
        if leaves or not self.leads_beyond:
            loss.backward(inputs=leaves if self.leads_beyond else None)  # type: ignore[no-untyped-call]

    def _take(self, leaf: Tensor) -> bool:
        known, _ = self._taken.get(id(leaf), (lambda: None, None))
        is_new = id(leaf) not in self._known and known() is not leaf
        if is_new:
            self._taken[id(leaf)], leaf.grad = (ref(leaf), leaf.grad), None
        return is_new

    def taken(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return those that still live, with the gradients that they had."""
        found = [(reference(), grad) for reference, grad in self._taken.values()]
        return [(leaf, grad) for leaf, grad in found if leaf is not None]

    def put_back(self, *, had: bool = True) -> None:
        """Give them the gradients that they had, or none."""
        for leaf, grad in self.taken():
            leaf.grad = grad if had else None

    def _leaves_of(self, loss: Tensor) -> Iterator[Tensor]:
        left: list[Any] = [loss.grad_fn]
        seen = {None, *left}
        while left:
            node = left.pop()
            if type(node).__name__ == "AccumulateGrad":
                yield node.variable
            elif node is not None and node._sequence_nr() < self._begun_at:
                self.leads_beyond = True
                continue
            following = {each for each, _ in getattr(node, "next_functions", ())} - seen
            seen |= following
            left += following
