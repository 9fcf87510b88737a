"""Replay: module calls that hold only their inputs, and run again when backward reaches them."""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.codecs.scratch import Scratch
from daf.core.errors import ReplayError, SavedTensorError, UnknownNameError
from daf.core.policy import Site
from daf.core.replaced import replaced
from daf.recompute.call_state import CallState, HeldInput, Inputs, distinct_tensors
from daf.recompute.fingerprint import Fingerprint, Form
from daf.recompute.holder import ReplayKeeper
from daf.recompute.random_state import Generators
from daf.recompute.watched_forward import WatchedForward, watched
from daf.saved_tensors.packed_tensor import PackedTensor, SavedTensor
from daf.torch_compat import autograd_graph
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.compiler import eagerly
from daf.torch_compat.operator_mode import Arguments, Keywords

_REPEAT = "a replayed module must do the same thing again: replay other modules, or none"
# These save a tensor and fill it afterwards.
_FILL_WHAT_THEY_SAVED = frozenset({F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_})
# Nor is all of what the others save here ever set.
SAVE_WHAT_IS_UNDEFINED = _FILL_WHAT_THEY_SAVED | {F.ctc_loss, torch.ctc_loss}


class Rebuilt(PackedTensor):
    """What is held in place of the ``index``-th tensor that a replayed call saves: a handle."""

    __slots__ = ("_call", "_first", "_value", "index")

    def __init__(self, call: "ReplayedCall", index: int, tensor: Tensor) -> None:
        super().__init__()
        self.index, self._call = index, call
        self._first = call.fingerprint(tensor, index)
        self._value: tuple[PackedTensor, Any] | None = None

    @property
    def is_rebuilt(self) -> bool:
        """True if the tensor is here, because its call ran again."""
        return self._value is not None

    def settle(self, tensor: Tensor) -> None:
        """Hold what the call saved in its second run; ReplayError if it is something else."""
        again, site = self._call.fingerprint(tensor, self.index), self._call.site
        if again.form != self._first.form:
            raise ReplayError(
                f"replaying {site.module!r} saved {again.form} where its first pass saved "
                f"{self._first.form}; {_REPEAT}",
                site.module,
            )
        self._call.note_difference(again.differs(self._first))
        self._value = self._call.replays.keeper.hold_rebuilt(tensor, site)

    def forget(self) -> None:
        """Free the tensor; the call can run again."""
        self._value = None

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the tensor, and hold it no longer.

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
        self, replays: "Replays", target: WatchedForward, inputs: Inputs, state: CallState
    ) -> None:
        self.site = Site(target.path, "replay", 0, 0)
        self.differentiates = False  # True if its forward pass itself asks for gradients
        self.fills_what_it_saved = False  # True if a save is complete only at the next one
        self.has_undefined_saves = False  # True if the operator that runs now may have some
        self._differences: list[Tensor] = []  # scalars on a device, True where saves differ
        self.replays = replays
        self._number = target.calls  # of this call, its latest
        self._forward = target.forward
        self._inputs, self._state = inputs, state
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
        """Raise ReplayError if a save differs from the first run's; waits for no device."""
        if isinstance(found, Tensor):
            self._differences.append(found)
        elif found:
            raise ReplayError(
                f"replaying {self.site.module!r} saved other values than its first pass, although "
                "its inputs, the default generators and what it keeps were restored: it draws from "
                "a generator elsewhere, or reads what others change; replay other modules, or none",
                self.site.module,
            )

    def _check_differences(self) -> None:
        differences, self._differences = self._differences, []
        if differences:
            self.note_difference(bool(torch.stack(differences).any()))

    def finish(self) -> None:
        """End the first pass, and count what is held of its state."""
        self._state.finish(self.replays.keeper.count)
        self._inputs.check_unchanged(self.site.module)

    def replay(self, wanted: Rebuilt) -> None:
        """Run the call again, which rebuilds ``wanted`` and all other handles alive.

        A second time in one backward pass it rebuilds that one only: the others were read already.
        ReplayError: the call saved fewer tensors than before.
        """
        task = autograd_graph.graph_task()
        again = task in (autograd_graph.NO_TASK, self._task)
        missing = [handle for handle in self._handles.values() if not handle.is_rebuilt]
        self._run(Collector(self, [wanted] if again else missing))
        if not wanted.is_rebuilt:
            raise ReplayError(
                f"replaying {self.site.module!r} saved fewer tensors than first; {_REPEAT}",
                self.site.module,
            )
        if self._differences and task != autograd_graph.NO_TASK:
            autograd_graph.call_after_backward(self._check_differences)
        else:
            self._check_differences()
        if not again:
            self._task = task
            reference = weakref.ref(self)

            def forget() -> None:
                if (call := reference()) is not None:
                    call.forget()

            autograd_graph.call_after_backward(forget)

    def forget(self) -> None:
        """Free rebuilt tensors that this backward pass did not read."""
        self._task = autograd_graph.NO_TASK
        for handle in list(self._handles.values()):
            handle.forget()

    def _run(self, collector: "Collector") -> None:
        arguments, keywords = self._inputs.restore(self.replays.keeper.scratch)
        with (
            self.replays.rebuilding(self.site.module, self._number, collector),
            self._state.restored(),
            collector.hooks(),
            eagerly(),
            suppress(_Complete),
        ):
            self._forward(*arguments, **keywords)


class _Complete(BaseException):
    """Every wanted tensor is rebuilt; no Exception, which a module may catch."""


class Collector:
    """Collects what a call saves when it runs again, and fills the wanted handles."""

    def __init__(self, call: ReplayedCall, wanted: list[Rebuilt]) -> None:
        self._wanted = {handle.index: handle for handle in wanted}
        self._last = max(self._wanted) + call.fills_what_it_saved
        self._path, self._saved = call.site.module, 0
        self._depth = 0  # of calls with handles of their own
        # Otherwise nobody goes backward through the second run's own graph.
        self._differentiates = call.differentiates

    def hooks(self) -> AbstractContextManager[None]:
        """Return the hooks of the second run."""
        return autograd_graph.saved_tensor_hooks(self._pack, self._unpack)

    def run_inner(
        self, forward: Callable[..., Any], arguments: Arguments, keywords: Keywords
    ) -> Any:
        """Run a replayed call inside this one, whose inputs are saves of this one."""
        if self._depth == 0:
            for tensor in distinct_tensors((arguments, keywords)):
                self._collect(tensor)
        with replaced(self, _depth=self._depth + 1):
            return forward(*arguments, **keywords)

    def _pack(self, tensor: Tensor) -> Tensor | None:
        if self._depth == 0:
            self._collect(tensor)
        return tensor.detach() if self._differentiates else None

    def _collect(self, tensor: Tensor) -> None:
        index, self._saved = self._saved, self._saved + 1
        if (handle := self._wanted.pop(index, None)) is not None:
            handle.settle(tensor)
        if index == self._last:
            raise _Complete

    def _unpack(self, packed: Tensor | None) -> Tensor:
        if packed is None:
            raise SavedTensorError(
                f"replaying {self._path!r} asked for gradients, which its first pass did "
                f"not; {_REPEAT}"
            )
        return packed


class ReplayLog:
    """The calls that the last backward pass replayed, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._task = autograd_graph.NO_TASK

    def clear(self) -> None:
        """Begin a new forward pass."""
        self.calls.clear()

    def note(self, path: str, call: int) -> None:
        """Note that a call runs again."""
        task = autograd_graph.graph_task()
        if task != self._task:
            self.calls.clear()
            self._task = task
        self.calls.append((path, call))


class Replays:
    """The replayed modules of one entered capture, by ``paths``, and the calls that run now.

    UnknownNameError: the model has no such module, or it has no ``forward``.
    """

    def __init__(
        self, model: nn.Module, paths: frozenset[str], keeper: ReplayKeeper, log: ReplayLog
    ) -> None:
        replayable = {module for _, module in CompiledModules(model).replayable()} if paths else ()
        modules = {
            id(module := _find(model, path, replayable)): (path, module) for path in sorted(paths)
        }
        self._targets = [WatchedForward(self.call, *each) for each in modules.values()]
        self._running: list[ReplayedCall | Collector] = []
        self._thread = get_ident()
        self._generators = Generators()
        self.keeper, self.log = keeper, log

    @property
    def is_running(self) -> bool:
        """True while a replayed call runs, for the first time or again."""
        return bool(self._running)

    def watching(self) -> AbstractContextManager[None]:
        """Let calls of the modules come here; restore their own ``forward`` at the end."""
        return watched(self._targets)

    @contextmanager
    def rebuilding(self, path: str, number: int, collector: Collector) -> Iterator[None]:
        """Run a call again inside, on whichever thread backward runs."""
        self.log.note(path, number)
        here = replaced(self, _thread=get_ident(), _running=[*self._running, collector])
        with here, self.keeper.rebuilding(), self.watching():
            yield

    def call(self, target: WatchedForward, arguments: Arguments, keywords: Keywords) -> Any:
        """Run a call of a replayed module."""
        if get_ident() != self._thread or not torch.is_grad_enabled():
            return target.forward(*arguments, **keywords)
        outer = self._running[-1] if self._running else None
        if isinstance(outer, Collector):
            return outer.run_inner(target.forward, arguments, keywords)
        target.calls += 1
        state = CallState(target, self._generators, arguments, keywords)
        inputs = Inputs((arguments, keywords), partial(self._hold_input, target.path, outer))
        call = ReplayedCall(self, target, inputs, state)
        self.keeper.note_reader(target.module, call)
        with replaced(self, _running=[*self._running, call]):
            result = target.forward(*arguments, **keywords)
        call.finish()
        return result

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Pack a tensor that an operator of the innermost replayed call saves."""
        call = self._running[-1]
        assert isinstance(call, ReplayedCall)  # a call that runs again has hooks of its own
        saved = SavedTensor(tensor)
        if (constant := self.keeper.keep_constant(tensor, call.site)) is not None:
            call.skip()
            saved.settle(constant)
        else:
            saved.settle(call.hold(tensor), self.keeper.note_save(tensor, call.site.module))
        return saved

    def note_operator(self, operator: Callable[..., Any]) -> None:
        """Note an operator of the innermost call that is about to run for the first time."""
        call = self._running[-1]
        if isinstance(call, ReplayedCall):
            call.fills_what_it_saved |= operator in _FILL_WHAT_THEY_SAVED
            call.has_undefined_saves = operator in SAVE_WHAT_IS_UNDEFINED

    def note_unpack(self) -> None:
        """Note a backward pass: calls that run now run it within their own forward pass."""
        for call in self._running:
            if isinstance(call, ReplayedCall):
                call.differentiates = True

    def _hold_input(
        self, path: str, outer: ReplayedCall | None, tensor: Tensor, index: int
    ) -> HeldInput:
        site = Site(path, "input", 0, index)
        if (constant := self.keeper.keep_constant(tensor, site)) is not None:
            if outer is not None:
                outer.skip()
            return HeldInput(constant, None, is_exact=True)
        if outer is None:
            return self.keeper.hold_input(tensor, site)
        return HeldInput(outer.hold(tensor), None, outer.is_exact)


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
