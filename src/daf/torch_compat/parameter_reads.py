"""Who may still read a parameter in the rest of a backward pass.

A parameter may be changed in mid-backward once nothing that is yet to run reads
it. Its own gradient being complete does not say so: ``F.linear(x, w.detach())``
reads ``w`` for the gradient of ``x`` and never adds to the gradient of ``w``.

Three kinds of reader are told apart:

- Nodes of PyTorch's own operators read what they saved and nothing else. The
  capture sees each such save and tells it here; autograd drops it as soon as
  the node has run. A parameter is free when no save of its storage is alive.
- Nodes that cannot be seen through: ``autograd.Function`` written in Python or
  C++ (unless it declares ``reads_only_what_it_saved``), in-place operators on
  views, which may hide such a function, nodes whose saves went to somebody
  else's saved-tensor hooks (``torch.utils.checkpoint`` runs the forward pass
  again from there), what compiled modules make, and nodes made before the forward
  pass began. While one of these has not run, no parameter is free.
- Hooks put on tensors during the forward pass. After one, no parameter is free
  until the backward pass has ended.

Not seen: a hook put straight on an autograd node (``Node.register_hook``) that
reads parameters itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from daf.torch_compat.autograd_graph import pack_hook, sequence_number, storage_address
from daf.torch_compat.autograd_nodes import sequence_number_of

DECLARATION = "reads_only_what_it_saved"
_ACCUMULATE = "AccumulateGrad"
_WRAPPER = "CopySlices"  # an in-place operator on a view; it hides the operator's own node


class ParameterReads:
    """The readers that one step's forward pass left behind."""

    def __init__(self) -> None:
        self._saves: dict[int, list[weakref.ref[object]]] | None = None  # None: nobody asks
        self._watch: ForwardWatch | None = None
        self._first_sequence_number = 0
        self._unseen_to_run = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward pass, within its capture."""
        self.forget()
        self._saves = {}
        self._first_sequence_number = sequence_number()
        self._watch = ForwardWatch()
        with self._watch:
            yield

    def note(self, tensor: Tensor, held: object) -> None:
        """A tensor that lies in somebody's own memory may be read for as long as ``held`` lives.

        That is what autograd holds for a save of it, or a call that may be replayed.
        """
        if self._saves is not None:
            saves = self._saves.setdefault(storage_address(tensor), [])
            saves.append(weakref.ref(held))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nodes that are made inside cannot be seen through."""
        first = sequence_number()
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.add_foreign(first, sequence_number())

    def begin_backward(self, loss: Tensor) -> None:
        """Look through the graph of ``loss``, which is about to run backward."""
        assert self._watch is not None
        unseen = [node for node in _nodes(loss.grad_fn) if self._is_unseen(node)]
        self._unseen_to_run = len(unseen)
        for node in unseen:
            node.register_hook(self._has_run)

    def is_free(self, parameter: Tensor) -> bool:
        """Will nothing that is yet to run read ``parameter``?"""
        if self._saves is None or self._watch is None:
            return False
        if self._unseen_to_run or self._watch.tensor_hooks:
            return False
        address = storage_address(parameter)
        alive = [save for save in self._saves.get(address, ()) if save() is not None]
        self._saves[address] = alive
        return not alive

    def forget(self) -> None:
        """The backward pass is over."""
        self._saves = None
        self._watch = None
        self._unseen_to_run = 0

    def _has_run(self, *_gradients: Any) -> None:
        self._unseen_to_run -= 1

    def _is_unseen(self, node: Any) -> bool:
        if isinstance(node, BackwardCFunction):
            function = node._forward_cls  # type: ignore[attr-defined]
            declared = getattr(function, DECLARATION, False)
        else:
            name = type(node).__name__
            declared = getattr(torch._C._functions, name, None) is type(node) and name != _WRAPPER
        number = sequence_number_of(node)
        assert self._watch is not None
        return (
            not declared or number < self._first_sequence_number or self._watch.is_foreign(number)
        )


class ForwardWatch(TorchFunctionMode):
    """Notes the nodes made under other saved-tensor hooks, and hooks on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_hooks = 0
        self._own_hooks = pack_hook()
        self._foreign: list[range] = []

    def is_foreign(self, sequence_number: int) -> bool:
        """Was the node of this number made under somebody else's saved-tensor hooks?"""
        return any(sequence_number in numbers for numbers in self._foreign)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator; PyTorch calls this."""
        if func is Tensor.register_hook:
            self.tensor_hooks += 1
        if pack_hook() is self._own_hooks:
            return func(*args, **(kwargs or {}))
        first = sequence_number()
        result = func(*args, **(kwargs or {}))
        self.add_foreign(first, sequence_number())
        return result

    def add_foreign(self, first: int, end: int) -> None:
        """Nodes of these numbers cannot be seen through."""
        if self._foreign and self._foreign[-1].stop == first:
            self._foreign[-1] = range(self._foreign[-1].start, end)
        elif first < end:
            self._foreign.append(range(first, end))


def _nodes(root: Any) -> Iterator[Any]:
    """Every node of a graph but those that accumulate into leaves."""
    found, open_nodes = {root}, [root]
    while open_nodes:
        node = open_nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found.add(following)
                if following.name().rpartition("::")[2] != _ACCUMULATE:
                    open_nodes.append(following)
