"""One replayed call: handles for what it saves, and the second run that fills them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.core.policy import Site
from daf.recompute.call_inputs import Inputs, distinct_tensors
from daf.recompute.call_state import CallState
from daf.recompute.fingerprint import Fingerprint, Form
from daf.recompute.holder import ReplayKeeper
from daf.saved_tensors.ledger import Holding
from daf.saved_tensors.packed_tensor import PackedTensor
from daf.torch_compat import autograd_graph
from daf.torch_compat.compiler import eagerly

_REPEAT = "a replayed module must do the same thing again: replay other modules, or none"


class Target(NamedTuple):
    """What runs again: the ``call``-th call of the module at ``path``, by its ``forward``."""

    path: str
    call: int
    forward: Callable[..., Any]


class RunsAgain(Protocol):
    """The part of ``Replays`` that one of its calls needs."""

    keeper: ReplayKeeper

    def note_unpack(self) -> None:
        """Note a backward pass."""

    def rebuilding(self, target: Target, collector: Collector) -> AbstractContextManager[None]:
        """Run a call again inside."""


class Rebuilt(PackedTensor):
    """What is held in place of the ``index``-th tensor that a replayed call saves: a handle."""

    __slots__ = ("_call", "_first", "_value", "index")

    def __init__(self, call: ReplayedCall, index: int, tensor: Tensor) -> None:
        super().__init__()
        self.index = index
        self._call = call
        self._first = call.fingerprint(tensor, index)
        self._value: tuple[PackedTensor, Any] | None = None

    @property
    def is_rebuilt(self) -> bool:
        """True if the tensor is here, because its call ran again."""
        return self._value is not None

    def settle(self, tensor: Tensor, keeper: ReplayKeeper, site: Site) -> None:
        """Hold what the call saved when it ran again.

        Raises:
            SavedTensorError: in the first pass it saved something else.
        """
        again = self._call.fingerprint(tensor, self.index)
        if again.form != self._first.form:
            raise SavedTensorError(
                f"replaying {site.module!r} saved {again.form} where its first pass saved "
                f"{self._first.form}; {_REPEAT}"
            )
        self._call.note_difference(again.differs(self._first))
        self._value = keeper.hold_rebuilt(tensor, site)

    def forget(self) -> None:
        """Free the tensor; the call can run again."""
        self._value = None

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the tensor, and hold it no longer.

        Raises:
            SavedTensorError: something the call depends on was changed in place since.
        """
        self._call.replays.note_unpack()
        if self._value is None:
            self._call.replay(self)
        value, self._value = self._value, None
        assert value is not None
        return value[0].restore(scratch)


class ReplayedCall:
    """One call of a replayed module: its inputs, its state, and handles for what it saves."""

    def __init__(
        self, replays: RunsAgain, target: Target, inputs: Inputs, state: CallState
    ) -> None:
        self.site = Site(target.path, "replay", 0, 0)
        self.differentiates = False  # True if its forward pass itself asks for gradients
        self.fills_what_it_saved = False  # True if a save is complete only at the next one
        self.has_undefined_saves = False  # True if the operator that runs now may have some
        self._differences: list[Tensor] = []  # scalars on a device, True where saves differ
        self.replays = replays
        self._target = target
        self._inputs = inputs
        self._state = state
        self._saves = 0
        self._handles: weakref.WeakValueDictionary[int, Rebuilt] = weakref.WeakValueDictionary()
        self._task = autograd_graph.NO_TASK

    def hold(self, tensor: Tensor) -> Rebuilt:
        """Return a handle for the next tensor that the call saves."""
        handle = self._handles[self._saves] = Rebuilt(self, self._saves, tensor)
        self._saves += 1
        return handle

    def skip(self) -> None:
        """Give the next tensor that the call saves no handle: it is held elsewhere."""
        self._saves += 1

    @property
    def is_exact(self) -> bool:
        """True if the second run begins with the first one's inputs, bit for bit."""
        return self._inputs.are_exact

    def fingerprint(self, tensor: Tensor, index: int) -> Fingerprint:
        """Return what the ``index``-th save is compared by; its form alone if bits may differ."""
        if self.is_exact and not self.has_undefined_saves:
            return Fingerprint.sampled(tensor, index)
        return Fingerprint(Form.of(tensor), None)

    def note_difference(self, found: bool | Tensor) -> None:
        """Note whether a save differs from the first run's; nobody waits for a device.

        Raises:
            SavedTensorError: it does.
        """
        if isinstance(found, Tensor):
            self._differences.append(found)
        elif found:
            raise SavedTensorError(
                f"replaying {self.site.module!r} saved other values than its first pass, although "
                "its inputs, the default generators and what it keeps were restored: it draws from "
                "a generator elsewhere, or reads what others change; replay other modules, or none"
            )

    def _check_differences(self) -> None:
        differences, self._differences = self._differences, []
        if differences:
            self.note_difference(bool(torch.stack(differences).any()))

    def finish(self, count: Callable[[int], Holding]) -> None:
        """End the first pass; ``count`` counts bytes that are held."""
        self._state.finish(count)
        self._inputs.check_unchanged(self.site.module)

    def replay(self, wanted: Rebuilt) -> None:
        """Run the call again, which rebuilds ``wanted`` and all other handles alive.

        A second time in one backward pass it rebuilds that one only: the others were read already.

        Raises:
            SavedTensorError: the call saved fewer tensors than before.
        """
        task = autograd_graph.graph_task()
        again = task in (autograd_graph.NO_TASK, self._task)
        missing = [handle for handle in self._handles.values() if not handle.is_rebuilt]
        self._run(Collector(self, [wanted] if again else missing))
        if not wanted.is_rebuilt:
            raise SavedTensorError(
                f"replaying {self.site.module!r} saved fewer tensors than its first pass; {_REPEAT}"
            )
        if self._differences and task != autograd_graph.NO_TASK:
            autograd_graph.call_after_backward(self._check_differences)
        else:
            self._check_differences()
        if not again:
            self._task = task
            forget = partial(_forget, weakref.ref(self))
            autograd_graph.call_after_backward(forget)

    def forget(self) -> None:
        """Free rebuilt tensors that this backward pass did not read."""
        self._task = autograd_graph.NO_TASK
        for handle in list(self._handles.values()):
            handle.forget()

    def _run(self, collector: Collector) -> None:
        arguments, keywords = self._inputs.restore(self.replays.keeper.scratch)
        with (
            self.replays.rebuilding(self._target, collector),
            self._state.restored(),
            collector.hooks(),
            eagerly(),
            suppress(_Complete),
        ):
            self._target.forward(*arguments, **keywords)


def _forget(reference: weakref.ref[ReplayedCall]) -> None:
    call = reference()
    if call is not None:
        call.forget()


class _Complete(BaseException):
    """Every wanted tensor is rebuilt; no Exception, which a module may catch."""


class Collector:
    """Collects what a call saves when it runs again, and fills the wanted handles."""

    def __init__(self, call: ReplayedCall, wanted: list[Rebuilt]) -> None:
        self._wanted = {handle.index: handle for handle in wanted}
        self._last = max(self._wanted) + call.fills_what_it_saved
        self._site = call.site
        self._keeper = call.replays.keeper
        self._saved = 0
        self._depth = 0  # of calls with handles of their own
        # Otherwise nobody goes backward through the second run's own graph.
        self._differentiates = call.differentiates

    def hooks(self) -> AbstractContextManager[None]:
        """Return the hooks of the second run."""
        return autograd_graph.saved_tensor_hooks(self._pack, self._unpack)

    def run_inner(
        self, forward: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Run a replayed call inside this one, whose inputs are saves of this one."""
        if self._depth == 0:
            for tensor in distinct_tensors((arguments, keywords)):
                self._collect(tensor)
        self._depth += 1
        try:
            return forward(*arguments, **keywords)
        finally:
            self._depth -= 1

    def _pack(self, tensor: Tensor) -> Tensor | None:
        if self._depth == 0:
            self._collect(tensor)
        return tensor.detach() if self._differentiates else None

    def _collect(self, tensor: Tensor) -> None:
        index, self._saved = self._saved, self._saved + 1
        handle = self._wanted.pop(index, None)
        if handle is not None:
            handle.settle(tensor, self._keeper, self._site)
        if index == self._last:
            raise _Complete

    def _unpack(self, packed: Tensor | None) -> Tensor:
        if packed is None:
            raise SavedTensorError(
                f"replaying {self._site.module!r} asked for gradients, which its first pass did "
                f"not; {_REPEAT}"
            )
        return packed
