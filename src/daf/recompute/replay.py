"""Replay: module calls that hold only their inputs, and run again when backward comes to them.

In the first pass a replayed call hands autograd a numbered handle for every
tensor it saves. Unpacking the first of them runs the call again from its
inputs and collects the tensors that backward still needs, in the same order;
it stops at the last one, and each is let go when its operator has read it.

A call inside a replayed call is a call of its own: its inputs are saves of the
outer call, and what it saves itself is rebuilt only when backward reaches it.
(The scheme is that of PyTorch's non-reentrant ``torch.utils.checkpoint``.)
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError, UnknownNameError
from daf.core.policy import Site
from daf.recompute.call_inputs import Inputs, distinct_tensors
from daf.recompute.call_state import CallState
from daf.saved_tensors.ledger import Holding
from daf.saved_tensors.packed_tensor import PackedTensor, SavedTensor
from daf.torch_compat.autograd_graph import NO_TASK, call_after_backward, graph_task
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.compiler_stance import eagerly

# These save a tensor and fill it only afterwards, so that it is nothing yet when it is seen.
_FILL_WHAT_THEY_SAVED = frozenset({F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_})


class Keeper(Protocol):
    """Holds and counts tensors for replayed calls."""

    scratch: Scratch

    def keep_constant(self, tensor: Tensor, site: Site) -> PackedTensor | None:
        """Hold a parameter, a buffer or the caller's own; None: it is none of these."""

    def hold_input(self, tensor: Tensor, site: Site) -> tuple[PackedTensor, Any]:
        """Hold an input, and what its account needs to stay alive."""

    def hold_rebuilt(self, tensor: Tensor, site: Site) -> tuple[PackedTensor, Any]:
        """Hold a rebuilt tensor, as it is, until backward has read it."""

    def note_save(self, tensor: Tensor, path: str) -> Any:
        """Plain PyTorch would hold this for as long as what is returned lives."""

    def note_reader(self, module: nn.Module, reader: object) -> None:
        """For as long as ``reader`` lives, every parameter of the module may be read again."""

    def count(self, nbytes: int) -> Holding:
        """Count bytes held beside tensors."""

    def rebuilding(self) -> AbstractContextManager[None]:
        """Inside, a call is run again: its operators are at no site."""


class ReplayLog:
    """Which calls were replayed in the last backward pass, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._task = NO_TASK

    def clear(self) -> None:
        """A new forward pass begins."""
        self.calls.clear()

    def note(self, path: str, call: int) -> None:
        """One call is run again."""
        task = graph_task()
        if task != self._task:
            self.calls.clear()
            self._task = task
        self.calls.append((path, call))


class Rebuilt(PackedTensor):
    """Stands for the ``index``-th tensor that a replayed call saves."""

    __slots__ = ("_call", "_form", "_value", "index")

    def __init__(self, call: ReplayedCall, index: int, tensor: Tensor) -> None:
        super().__init__()
        self.index = index
        self._call = call
        self._form = _form(tensor)
        self._value: tuple[PackedTensor, Any] | None = None

    @property
    def is_rebuilt(self) -> bool:
        """Is the tensor here, because its call was run again?"""
        return self._value is not None

    def settle(self, tensor: Tensor, keeper: Keeper, site: Site) -> None:
        """The call was run again and saved this.

        Raises:
            SavedTensorError: in the first pass it saved something else.
        """
        if _form(tensor) != self._form:
            raise SavedTensorError(
                f"replaying {site.module!r} saved {_form(tensor)} where its first pass saved "
                f"{self._form}; a replayed module must do the same thing again with the same "
                "inputs: replay other modules, or none"
            )
        self._value = keeper.hold_rebuilt(tensor, site)

    def forget(self) -> None:
        """Let go of the tensor; the call can be run again."""
        self._value = None

    def restore(self, scratch: Scratch) -> Tensor:
        """The tensor, which is held no longer.

        Raises:
            SavedTensorError: something the call depends on was changed in place since.
        """
        self._call.note_unpack()
        if self._value is None:
            self._call.replay(self)
        value, self._value = self._value, None
        assert value is not None
        return value[0].restore(scratch)


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


class ReplayedCall:
    """One call of a replayed module: its inputs, its state, and handles for what it saves."""

    def __init__(
        self, replays: Replays, target: ReplayedForward, inputs: Inputs, state: CallState
    ) -> None:
        self.site = Site(target.path, "replay", 0, 0)
        self.differentiates = False  # does its forward pass itself ask for gradients?
        self.fills_what_it_saved = False  # then a save is complete when the next one is seen
        self._count = target.calls
        self._replays = replays
        self._forward = target.forward
        self._inputs = inputs
        self._state = state
        self._handles: list[weakref.ref[Rebuilt] | None] = []
        self._task = NO_TASK

    def hold(self, tensor: Tensor) -> Rebuilt:
        """A handle for the next tensor that the call saves."""
        handle = Rebuilt(self, len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    def skip(self) -> None:
        """The next tensor that the call saves is held by someone else."""
        self._handles.append(None)

    def note_unpack(self) -> None:
        """Somebody goes backward; calls that run now do so within their own forward pass."""
        self._replays.note_unpack()

    def finish(self, count: Callable[[int], Holding]) -> None:
        """The first pass returned."""
        self._state.finish(count)
        self._inputs.check_unchanged(self.site.module)

    def replay(self, asked: Rebuilt) -> None:
        """Run the call again; afterwards ``asked`` has its tensor, and so have all others alive.

        Asked a second time in one backward pass, only that one is rebuilt: the
        others were read already.

        Raises:
            SavedTensorError: the call saved fewer tensors than before.
        """
        task = graph_task()
        again = task in (NO_TASK, self._task)
        wanted = [asked] if again else [handle for handle in self._alive() if not handle.is_rebuilt]
        self._run(Collector(self, wanted, self._replays.keeper))
        if not asked.is_rebuilt:
            raise SavedTensorError(
                f"replaying {self.site.module!r} saved fewer tensors than its first pass; a "
                "replayed module must do the same thing again with the same inputs"
            )
        if not again:
            self._task = task
            forget = partial(_forget, weakref.ref(self))
            call_after_backward(forget)

    def forget(self) -> None:
        """Let go of rebuilt tensors that this backward pass did not read."""
        self._task = NO_TASK
        for handle in self._alive():
            handle.forget()

    def _alive(self) -> list[Rebuilt]:
        found = (reference() for reference in self._handles if reference is not None)
        return [handle for handle in found if handle is not None]

    def _run(self, collector: Collector) -> None:
        arguments, keywords = self._inputs.restore(self._replays.keeper.scratch)
        self._replays.log.note(self.site.module, self._count)
        with (
            self._replays.rebuilding(collector),
            self._state.restored(),
            collector.hooks(),
            eagerly(),
            suppress(_Complete),
        ):
            self._forward(*arguments, **keywords)


def _forget(reference: weakref.ref[ReplayedCall]) -> None:
    call = reference()
    if call is not None:
        call.forget()


class _Complete(BaseException):
    """Everything wanted was rebuilt. (No Exception, which a module may catch.)"""


class Collector:
    """Sees what a call saves when it runs again, and fills the handles that want it."""

    def __init__(self, call: ReplayedCall, wanted: list[Rebuilt], keeper: Keeper) -> None:
        self._wanted = {handle.index: handle for handle in wanted}
        self._last = max(self._wanted) + call.fills_what_it_saved
        self._site = call.site
        self._keeper = keeper
        self._saved = 0
        self._depth = 0  # of calls with handles of their own
        # Otherwise nobody goes backward through the second run's own graph.
        self._differentiates = call.differentiates

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """For the second run's duration."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def run_inner(
        self, forward: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """A replayed call inside this one: its inputs are wanted, what it saves is its own."""
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
                "not; a replayed module must do the same thing again with the same inputs"
            )
        return packed


class ReplayedForward:
    """Stands in the place of a module's ``forward`` while a capture is entered."""

    def __init__(self, replays: Replays, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.calls = -1
        self._replays = replays

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module's own ``forward`` under the capture's eyes."""
        return self._replays.call(self, arguments, keywords)

    def __reduce__(self) -> Any:
        """Copies and pickles of the module get its own ``forward``."""
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


class Replays:
    """The replayed modules of one entered capture, and the calls that run now."""

    def __init__(
        self, model: nn.Module, paths: frozenset[str], keeper: Keeper, log: ReplayLog
    ) -> None:
        """Prepare to replay every call of the modules that ``paths`` name.

        Raises:
            UnknownNameError: the model has no such module, or it has no ``forward``.
        """
        replayable = {module for _, module in CompiledModules(model).replayable()} if paths else ()
        modules = {
            id(module := _find(model, path, replayable)): (path, module) for path in sorted(paths)
        }
        self._targets = [ReplayedForward(self, path, module) for path, module in modules.values()]
        self._running: list[ReplayedCall | Collector] = []
        self._thread = get_ident()
        self.keeper = keeper
        self.log = log

    @property
    def is_running(self) -> bool:
        """Does a replayed call run now, for the first time or again?"""
        return bool(self._running)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls of the modules come here; their own ``forward`` returns whatever happens."""
        nothing = object()
        spaces = [(target, target.module.__dict__) for target in self._targets]
        before = [(space, space.get("forward", nothing)) for _, space in spaces]
        try:
            for target, space in spaces:
                space["forward"] = target
            yield
        finally:
            for space, own in before:
                if own is nothing:
                    space.pop("forward", None)
                else:
                    space["forward"] = own

    @contextmanager
    def rebuilding(self, collector: Collector) -> Iterator[None]:
        """A call is run again, on whichever thread backward runs."""
        outer, self._thread = self._thread, get_ident()
        depth = len(self._running)
        self._running.append(collector)
        try:
            with self.keeper.rebuilding(), self.watching():
                yield
        finally:
            del self._running[depth:]
            self._thread = outer

    def call(
        self, target: ReplayedForward, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """A replayed module is called."""
        if get_ident() != self._thread or not torch.is_grad_enabled():
            return target.forward(*arguments, **keywords)
        outer = self._running[-1] if self._running else None
        if isinstance(outer, Collector):
            return outer.run_inner(target.forward, arguments, keywords)
        target.calls += 1
        state = CallState(target.module, target.path, _devices(target.module, arguments, keywords))
        inputs = Inputs((arguments, keywords), partial(self._hold_input, target.path, outer))
        call = ReplayedCall(self, target, inputs, state)
        self.keeper.note_reader(target.module, call)
        depth = len(self._running)
        self._running.append(call)
        try:
            result = target.forward(*arguments, **keywords)
        finally:
            del self._running[depth:]
        call.finish(self.keeper.count)
        return result

    def pack(self, tensor: Tensor) -> SavedTensor:
        """An operator of the innermost replayed call saves a tensor."""
        call = self._running[-1]
        assert isinstance(call, ReplayedCall)  # a call that runs again has hooks of its own
        saved = SavedTensor(tensor)
        constant = self.keeper.keep_constant(tensor, call.site)
        if constant is not None:
            call.skip()
            saved.settle(constant)
        else:
            saved.settle(call.hold(tensor), self.keeper.note_save(tensor, call.site.module))
        return saved

    def note_operator(self, operator: Callable[..., Any]) -> None:
        """An operator of the innermost call is about to run, for the first time."""
        call = self._running[-1]
        if operator in _FILL_WHAT_THEY_SAVED and isinstance(call, ReplayedCall):
            call.fills_what_it_saved = True

    def note_unpack(self) -> None:
        """Somebody goes backward; calls that run now do so within their own forward pass."""
        for call in self._running:
            if isinstance(call, ReplayedCall):
                call.differentiates = True

    def _hold_input(
        self, path: str, outer: ReplayedCall | None, tensor: Tensor, index: int
    ) -> tuple[PackedTensor, Any]:
        site = Site(path, "input", 0, index)
        constant = self.keeper.keep_constant(tensor, site)
        if outer is None:
            return (constant, None) if constant else self.keeper.hold_input(tensor, site)
        if constant is not None:
            outer.skip()
            return constant, None
        return outer.hold(tensor), None


def _devices(module: nn.Module, *inputs: Any) -> set[torch.device]:
    tensors = [*distinct_tensors(inputs), *module.parameters()]
    return {tensor.device for tensor in tensors}


def _find(model: nn.Module, path: str, replayable: Collection[nn.Module]) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise UnknownNameError(
            f"asked to replay {path!r}; {type(model).__name__} has no module of that name; "
            "see named_modules()"
        ) from error
    if module not in replayable:
        raise UnknownNameError(
            f"asked to replay {path!r}, a {type(module).__name__} that is compiled, or has a part "
            "that is, whose calls cannot be seen; name modules that are not compiled"
        )
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise UnknownNameError(
            f"asked to replay {path!r}, a {type(module).__name__}, which is never called itself; "
            "name the modules inside it"
        )
    return module
