"""Proof that calls of modules repeat themselves, on the user's own model and loss.

After a forward pass every call runs again as a replay would run it: from the inputs and the state
that it found, when all that ran after it has left its traces. What it saves and returns must have
the same bits as before. Calls inside a call run within that one, and once more by themselves.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.core.policy import Site
from daf.core.replaced import replaced
from daf.recompute.call_state import CallState, HeldInput, Inputs, distinct_tensors
from daf.recompute.fingerprint import Fingerprint
from daf.recompute.python_state import PythonState, Surroundings
from daf.recompute.random_state import Generators
from daf.recompute.replay import SAVE_WHAT_IS_UNDEFINED
from daf.recompute.watched_forward import WatchedForward, watched
from daf.saved_tensors.packed_tensor import Kept
from daf.torch_compat.autograd_graph import (
    pack_hook,
    saved_tensor_hooks,
    storage_address,
    strided_parts,
    version_of,
    without_torch_function,
)
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.compiler import eagerly
from daf.torch_compat.modules import modules_of
from daf.torch_compat.operator_mode import Arguments, Keywords, OperatorMode

NO_ROOM = "the budget has no room to hold what it is given while that is tried"
NO_TIME = "trying it would take longer than the step itself"
_OTHER_SAVES = (
    "called again from the same state, it does not save the same values: it draws from a generator "
    "elsewhere, or reads what others change"
)
_TRACES = "called again, it changes what is kept elsewhere: in a global or by another module, say"
_OTHER_RESULT = "called again from the same state, it does not return the same values"


class _Call(NamedTuple):
    """One call of the first pass, and what it saved and returned."""

    target: WatchedForward
    inputs: Inputs
    state: CallState
    saves: tuple[Fingerprint, ...]
    results: tuple[Fingerprint, ...]
    seconds: float  # that it took, saves read included


class ReplayProof:
    """Watches one forward pass inside ``watching``, then runs the calls of ``paths`` again.

    Args:
        model: of which ``paths`` are modules, the most important ones first.
        room_bytes: the most that inputs of calls may hold, and what is saved is not held; None:
            there is room for all of it.
        deadline_s: of ``time.thread_time``, which other processes do not use up; what is not
            proven by then is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Sequence[str],
        room_bytes: int | None = None,
        deadline_s: float = float("inf"),
    ) -> None:
        self._model = model
        modules = CompiledModules(model).replayable()
        self._order = {path: place for place, path in enumerate(paths)}
        self._targets = [
            WatchedForward(self.call, path, each) for path, each in modules if path in self._order
        ]
        self._constants = set[int]().union(*map(_storages, model.parameters()))
        self._room_bytes, self._deadline_s = room_bytes, deadline_s
        self._refusals: dict[str, str] = {}
        self._calls: list[_Call] = []
        self._saves = _Saves(self._constants, holds=room_bytes is None)
        self._held: set[int] = set()
        self._generators = Generators()
        self._thread = get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward pass and the loss, which run inside."""
        with watched(self._targets), self._saves.watching():
            yield

    def call(self, target: WatchedForward, arguments: Arguments, keywords: Keywords) -> Any:
        """Run a call, and note what it found, saved and returned."""
        is_watched = get_ident() == self._thread and torch.is_grad_enabled()
        if not is_watched or not self._saves.sees or target.path in self._refusals:
            return target.forward(*arguments, **keywords)
        with without_torch_function():
            if has_room := self._has_room((arguments, keywords)):
                state = CallState(target, self._generators, arguments, keywords)
                inputs = Inputs((arguments, keywords), self._hold)
        if not has_room:
            self._refusals[target.path] = NO_ROOM
            return target.forward(*arguments, **keywords)
        first, start_s = len(self._saves.found), time.thread_time()
        with self._saves.inside():
            result = target.forward(*arguments, **keywords)
        with without_torch_function():
            what = (target, inputs, state, self._saves.since(first))
            self._note(_Call(*what, _all_of(result), time.thread_time() - start_s))
        return result

    def _has_room(self, nest: Any) -> bool:
        """Count the storages of a call's inputs; False if they exceed the room."""
        if self._room_bytes is None:
            return True
        parts = [part for tensor in distinct_tensors(nest) for part in strided_parts(tensor)]
        new = {storage_address(each): each.untyped_storage().nbytes() for each in parts}
        for address in self._constants | self._held:
            new.pop(address, None)
        if sum(new.values()) > self._room_bytes:
            return False
        self._room_bytes -= sum(new.values())
        self._held.update(new)
        return True

    def _hold(self, tensor: Tensor, index: int) -> HeldInput:
        kept = Kept(tensor, version_of(tensor), Site("", "input", 0, index))
        return HeldInput(kept, None, is_exact=True)

    def _note(self, call: _Call) -> None:
        try:
            call.state.finish(lambda _: None)
            call.inputs.check_unchanged(call.target.path)
        except SavedTensorError as error:
            self._refusals[call.target.path] = str(error)
            return
        self._calls.append(call)

    def run_again(self) -> Mapping[str, str]:
        """Run every call again; return why modules (by path) must not be replayed."""
        self._calls.sort(key=lambda call: -self._order[call.target.path])
        elsewhere, own = Surroundings.of(self._model).state_elsewhere(), _ModelState(self._model)
        while self._calls:
            call = self._calls.pop()
            if call.target.path not in self._refusals:
                is_late = time.thread_time() + call.seconds > self._deadline_s
                reason = NO_TIME if is_late else self._differs(call)
                if elsewhere.changes():
                    elsewhere.put_back()
                    reason = reason or _TRACES
                if reason:
                    self._refusals[call.target.path] = reason
        if own.has_changed():  # by which call, nobody noted
            self._refusals = dict.fromkeys(self._order, _TRACES) | self._refusals
        return self._refusals

    def _differs(self, call: _Call) -> str:
        """Return how the second run of a call differs; empty where it does not."""
        saves = _Saves(self._constants, holds=True)
        try:
            arguments, keywords = call.inputs.restore(Scratch())
            with call.state.restored(), saves.watching(), saves.inside(), eagerly():
                result = call.target.forward(*arguments, **keywords)
        except Exception as error:  # a module's own, which the first run did not raise
            return f"called again from the same state, it raised {type(error).__name__}: {error}"
        if not _are_alike(call.saves, saves.since(0)):
            return _OTHER_SAVES
        return "" if _are_alike(call.results, _all_of(result)) else _OTHER_RESULT


class _ModelState:
    """What a model keeps: in Python, parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._python = PythonState(modules_of(model))
        self._tensors = [
            (each, Fingerprint.sampled(each, 0))
            for each in (*model.parameters(), *model.buffers())
            if not is_lazy(each)
        ]

    def has_changed(self) -> bool:
        """True if anything is other than it was; undo what is in Python."""
        changes = self._python.changes()
        self._python.put_back()
        return bool(changes or self._python.written()) or any(
            bool(Fingerprint.sampled(each, 0).differs(before)) for each, before in self._tensors
        )


class _Saves:
    """Fingerprints of what autograd saves ``inside`` calls, but for memory of ``constants``."""

    def __init__(self, constants: set[int], *, holds: bool) -> None:
        self.found: list[Fingerprint] = []
        self._constants, self._holds = constants, holds
        self._is_undefined, self._depth = False, 0

    def inside(self) -> AbstractContextManager[None]:
        """Read what a call inside saves; what others save tells nothing."""
        return replaced(self, _depth=self._depth + 1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is saved inside."""
        with OperatorMode(self._run), saved_tensor_hooks(self._pack, self._unpack):
            yield

    @property
    def sees(self) -> bool:
        """True unless somebody else's hooks (checkpointing) take what is saved."""
        return bool(pack_hook() == self._pack)

    def since(self, first: int) -> tuple[Fingerprint, ...]:
        """Return the fingerprints from the ``first`` on."""
        return tuple(self.found[first:])

    def _run(self, function: Callable[..., Any], arguments: Arguments, keywords: Keywords) -> Any:
        self._is_undefined = function in SAVE_WHAT_IS_UNDEFINED
        return function(*arguments, **keywords)

    def _pack(self, tensor: Tensor) -> Tensor | None:
        with without_torch_function():
            if self._depth and not self._is_undefined and not self._is_constant(tensor):
                self.found.append(Fingerprint.whole(tensor))
            return tensor.detach() if self._holds else None

    def _is_constant(self, tensor: Tensor) -> bool:
        storages = _storages(tensor)
        return bool(storages) and storages <= self._constants

    def _unpack(self, packed: Tensor | None) -> Tensor:
        if packed is None:
            raise SavedTensorError(f"a module differentiates in its forward pass: {NO_ROOM}")
        return packed


def _storages(tensor: Tensor) -> set[int]:
    return {storage_address(part) for part in strided_parts(tensor)}


def _all_of(nest: Any) -> tuple[Fingerprint, ...]:
    return tuple(map(Fingerprint.whole, distinct_tensors(nest)))


def _are_alike(first: tuple[Fingerprint, ...], second: tuple[Fingerprint, ...]) -> bool:
    return len(first) == len(second) and not any(
        one.form != other.form or bool(one.differs(other))
        for one, other in zip(first, second, strict=True)
    )
