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

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.errors import UnknownNameError
from daf.core.policy import Site
from daf.recompute.call_inputs import HeldInput, Inputs
from daf.recompute.call_state import CallState
from daf.recompute.holder import ReplayKeeper
from daf.recompute.random_state import Generators
from daf.recompute.replayed_call import Collector, ReplayedCall, Target
from daf.recompute.watched_forward import WatchedForward, watched
from daf.saved_tensors.packed_tensor import SavedTensor
from daf.torch_compat.autograd_graph import NO_TASK, graph_task
from daf.torch_compat.compiled_modules import CompiledModules

# These save a tensor and fill it afterwards.
_FILL_WHAT_THEY_SAVED = frozenset({F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_})
# Nor is all of what the others save here ever set.
SAVE_WHAT_IS_UNDEFINED = _FILL_WHAT_THEY_SAVED | {F.ctc_loss, torch.ctc_loss}


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
        self._targets = [WatchedForward(self.call, *each) for each in modules.values()]
        self._running: list[ReplayedCall | Collector] = []
        self._thread = get_ident()
        self._generators = Generators()
        self.keeper = keeper
        self.log = log

    @property
    def is_running(self) -> bool:
        """True while a replayed call runs, for the first time or again."""
        return bool(self._running)

    def watching(self) -> AbstractContextManager[None]:
        """Let calls of the modules come here; restore their own ``forward`` at the end."""
        return watched(self._targets)

    @contextmanager
    def rebuilding(self, target: Target, collector: Collector) -> Iterator[None]:
        """Run a call again inside, on whichever thread backward runs."""
        self.log.note(target.path, target.call)
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
        self, target: WatchedForward, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Run a call of a replayed module."""
        if get_ident() != self._thread or not torch.is_grad_enabled():
            return target.forward(*arguments, **keywords)
        outer = self._running[-1] if self._running else None
        if isinstance(outer, Collector):
            return outer.run_inner(target.forward, arguments, keywords)
        target.calls += 1
        place = (target.module, target.path, self._generators)
        state = CallState(*place, arguments, keywords)
        inputs = Inputs((arguments, keywords), partial(self._hold_input, target.path, outer))
        what = Target(target.path, target.calls, target.forward)
        call = ReplayedCall(self, what, inputs, state)
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
        constant = self.keeper.keep_constant(tensor, site)
        if constant is not None:
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
