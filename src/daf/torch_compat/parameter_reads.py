"""Who may still read a parameter in the rest of a backward pass."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from daf.torch_compat import autograd_graph

DECLARATION = "reads_only_what_it_saved"
_ACCUMULATE = "AccumulateGrad"
_WRAPPER = "CopySlices"  # an in-place operator on a view; it hides the operator's own node


class ParameterReads:
    """The readers of parameters that one step's forward pass made."""

    def __init__(self) -> None:
        self._saves: dict[int, list[weakref.ref[object]]] | None = None  # None: nobody asks
        self._watch: ForwardWatch | None = None
        self._first_sequence_number, self._opaque_to_run = 0, 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward pass, within its capture."""
        self.forget()
        self._saves = {}
        self._first_sequence_number = autograd_graph.sequence_number()
        self._watch = ForwardWatch()
        with self._watch:
            yield

    def note(self, tensor: Tensor, held: object) -> None:
        """Note that a tensor may be read while ``held`` lives: a save, or a call to replay."""
        if self._saves is not None:
            saves = self._saves.setdefault(autograd_graph.storage_address(tensor), [])
            saves.append(weakref.ref(held))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Treat nodes that are made inside as opaque."""
        first = autograd_graph.sequence_number()
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.add_foreign(first, autograd_graph.sequence_number())

    def begin_backward(self, loss: Tensor) -> None:
        """Find the opaque nodes of ``loss``, which is about to run backward."""
        assert self._watch is not None
        opaque = [node for node in graph_nodes(loss.grad_fn) if self._is_opaque(node)]
        self._opaque_to_run = len(opaque)
        for node in opaque:
            node.register_hook(self._has_run)

    def is_free(self, parameter: Tensor) -> bool:
        """True if no node that is yet to run reads ``parameter``."""
        if self._saves is None or self._watch is None:
            return False
        if self._opaque_to_run or self._watch.tensor_hooks:
            return False
        address = autograd_graph.storage_address(parameter)
        alive = [save for save in self._saves.get(address, ()) if save() is not None]
        self._saves[address] = alive
        return not alive

    def forget(self) -> None:
        """Forget all readers: the backward pass is over."""
        self._saves, self._watch = None, None
        self._opaque_to_run = 0

    def _has_run(self, *_gradients: Any) -> None:
        self._opaque_to_run -= 1

    def _is_opaque(self, node: Any) -> bool:
        if isinstance(node, BackwardCFunction):
            declared = getattr(node._forward_cls, DECLARATION, False)  # type: ignore[attr-defined]
        else:
            name = type(node).__name__
            declared = getattr(torch._C._functions, name, None) is type(node) and name != _WRAPPER
        number = autograd_graph.sequence_number_of(node)
        assert self._watch is not None
        is_foreign = any(number in numbers for numbers in self._watch.foreign)
        return not declared or number < self._first_sequence_number or is_foreign


class ForwardWatch(TorchFunctionMode):
    """Notes nodes made under other saved-tensor hooks, and hooks on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_hooks = 0
        self._own_hooks = autograd_graph.pack_hook()
        self.foreign: list[range] = []  # sequence numbers of such nodes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            self.tensor_hooks += 1
        if autograd_graph.pack_hook() is self._own_hooks:
            return func(*args, **(kwargs or {}))
        first = autograd_graph.sequence_number()
        result = func(*args, **(kwargs or {}))
        self.add_foreign(first, autograd_graph.sequence_number())
        return result

    def add_foreign(self, first: int, end: int) -> None:
        """Treat nodes of these numbers as opaque."""
        if self.foreign and self.foreign[-1].stop == first:
            self.foreign[-1] = range(self.foreign[-1].start, end)
        elif first < end:
            self.foreign.append(range(first, end))


def graph_nodes(root: Any) -> Iterator[Any]:
    """Yield every node of a graph but those that accumulate into leaves."""
    found, open_nodes = {root}, [root]
    while open_nodes:
        node = open_nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found.add(following)
                if following.name().rpartition("::")[2] != _ACCUMULATE:
                    open_nodes.append(following)
