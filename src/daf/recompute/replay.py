"""Replay: module calls that hold only their inputs, and run again when backward reaches them.

In the first pass a replayed call gives autograd a numbered handle for every tensor it saves.
Unpacking the first of them runs the call again from its inputs and collects the tensors that
backward still needs, in the same order. The run stops at the last one, and each is freed when its
operator has read it.

A call inside a replayed call is a call of its own: its inputs are saves of the outer call, and what
it saves itself is rebuilt only when backward reaches it. (The scheme is that of PyTorch's
non-reentrant ``torch.utils.checkpoint``.)
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError, UnknownNameError
from daf.core.policy import Site
from daf.recompute.call_inputs import Inputs, distinct_tensors
from daf.recompute.call_state import CallState
from daf.recompute.holder import ReplayKeeper
from daf.recompute.random_state import Generators
from daf.saved_tensors.ledger import Holding
from daf.saved_tensors.packed_tensor import PackedTensor, SavedTensor
from daf.torch_compat.autograd_graph import NO_TASK, call_after_backward, graph_task
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.compiler_stance import eagerly

# These save a tensor and fill it afterwards.
_FILL_WHAT_THEY_SAVED = frozenset({F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_})


class ReplayLog:
    """The calls that the last backward pass replayed, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._task = NO_TASK

    def clear(self) -> None:
        """Begin a new forward pass."""
        self.calls.clear()

    def note(self, path: str, call: int) -> None:
        """Note that a call runs again."""
        task = graph_task()
        if task != self._task:
            self.calls.clear()
            self._task = task
        self.calls.append((path, call))


class Rebuilt(PackedTensor):
    """What is held in place of the ``index``-th tensor that a replayed call saves: a handle."""

    __slots__ = ("_call", "_form", "_value", "index")

    def __init__(self, call: ReplayedCall, index: int, tensor: Tensor) -> None:
        super().__init__()
        self.index = index
        self._call = call
        self._form = _form(tensor)
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
        if _form(tensor) != self._form:
            raise SavedTensorError(
                f"replaying {site.module!r} saved {_form(tensor)} where its first pass saved "
                f"{self._form}; a replayed module must do the same thing again with the same "
                "inputs: replay other modules, or none"
            )
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


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


class ReplayedCall:
    """One call of a replayed module: its inputs, its state, and handles for what it saves."""

    def __init__(
        self, replays: Replays, target: ReplayedForward, inputs: Inputs, state: CallState
    ) -> None:
        self.site = Site(target.path, "replay", 0, 0)
        self.differentiates = False  # True if its forward pass itself asks for gradients
        self.fills_what_it_saved = False  # True if a save is complete only at the next one
        self._count = target.calls
        self.replays = replays
        self._forward = target.forward
        self._inputs = inputs
        self._state = state
        self._saves = 0
        self._handles: weakref.WeakValueDictionary[int, Rebuilt] = weakref.WeakValueDictionary()
        self._task = NO_TASK

    def hold(self, tensor: Tensor) -> Rebuilt:
        """Return a handle for the next tensor that the call saves."""
        handle = self._handles[self._saves] = Rebuilt(self, self._saves, tensor)
        self._saves += 1
        return handle

    def skip(self) -> None:
        """Give the next tensor that the call saves no handle: it is held elsewhere."""
        self._saves += 1

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
        task = graph_task()
        again = task in (NO_TASK, self._task)
        missing = [handle for handle in self._handles.values() if not handle.is_rebuilt]
        self._run(Collector(self, [wanted] if again else missing))
        if not wanted.is_rebuilt:
            raise SavedTensorError(
                f"replaying {self.site.module!r} saved fewer tensors than its first pass; a "
                "replayed module must do the same thing again with the same inputs"
            )
        if not again:
            self._task = task
            forget = partial(_forget, weakref.ref(self))
            call_after_backward(forget)

    def forget(self) -> None:
        """Free rebuilt tensors that this backward pass did not read."""
        self._task = NO_TASK
        for handle in list(self._handles.values()):
            handle.forget()

    def _run(self, collector: Collector) -> None:
        arguments, keywords = self._inputs.restore(self.replays.keeper.scratch)
        self.replays.log.note(self.site.module, self._count)
        with (
            self.replays.rebuilding(collector),
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

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the hooks of the second run."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

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
                "not; a replayed module must do the same thing again with the same inputs"
            )
        return packed


class ReplayedForward:
    """What takes the place of a module's ``forward`` while a capture is entered."""

    def __init__(self, replays: Replays, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.calls = -1
        self._replays = replays

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module's own ``forward`` as a replayed call."""
        return self._replays.call(self, arguments, keywords)

    def __reduce__(self) -> Any:
        """Give copies and pickles of the module its own ``forward``."""
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


class Replays:
    """The replayed modules of one entered capture, by ``paths``, and the calls that run now.

    Raises:
        UnknownNameError: the model has no such module, or it has no ``forward``.
    """

    def __init__(
        self, model: nn.Module, paths: frozenset[str], keeper: ReplayKeeper, log: ReplayLog
    ) -> None:
        replayable = {module for _, module in CompiledModules(model).replayable()} if paths else ()
        modules = {
            id(module := _find(model, path, replayable)): (path, module) for path in sorted(paths)
        }
        self._targets = [ReplayedForward(self, path, module) for path, module in modules.values()]
        self._running: list[ReplayedCall | Collector] = []
        self._thread = get_ident()
        self._generators = Generators()
        self.keeper = keeper
        self.log = log

    @property
    def is_running(self) -> bool:
        """True while a replayed call runs, for the first time or again."""
        return bool(self._running)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let calls of the modules come here; restore their own ``forward`` at the end."""
        spaces = [target.module.__dict__ for target in self._targets]
        before = [{k: space[k] for k in ("forward",) if k in space} for space in spaces]
        try:
            for target, space in zip(self._targets, spaces, strict=True):
                space["forward"] = target
            yield
        finally:
            for space, own in zip(spaces, before, strict=True):
                space.pop("forward", None)
                space.update(own)

    @contextmanager
    def rebuilding(self, collector: Collector) -> Iterator[None]:
        """Run a call again inside, on whichever thread backward runs."""
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
        """Run a call of a replayed module."""
        if get_ident() != self._thread or not torch.is_grad_enabled():
            return target.forward(*arguments, **keywords)
        outer = self._running[-1] if self._running else None
        if isinstance(outer, Collector):
            return outer.run_inner(target.forward, arguments, keywords)
        target.calls += 1
        devices = _devices(target.module, arguments, keywords)
        state = CallState(target.module, target.path, devices, self._generators)
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
        """Pack a tensor that an operator of the innermost replayed call saves."""
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
        """Note an operator of the innermost call that is about to run for the first time."""
        call = self._running[-1]
        if operator in _FILL_WHAT_THEY_SAVED and isinstance(call, ReplayedCall):
            call.fills_what_it_saved = True

    def note_unpack(self) -> None:
        """Note a backward pass: calls that run now run it within their own forward pass."""
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
