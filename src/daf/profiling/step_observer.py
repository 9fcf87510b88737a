"""Observes one small step: what is saved, read, freed and transient, moment by moment.

``Capture.step`` takes an ``Observer``. A moment begins when a forward operator begins and when
backward reads a saved tensor; the allocator's account gives the peak of live bytes between two
moments. The result is plain data (``Observation``), from which ``profiler`` makes a Profile.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.codecs.layout import content_key
from daf.core.policy import KEEP, Method, Need, Reading, Site, Treatment
from daf.kernels.devices import norm_part_bytes_on
from daf.memory.domain import MemoryDomain, ProcessMemory, device_of
from daf.operators.activation import SmoothHeld, decoded_bytes_on
from daf.recompute.recipe import Recomputed
from daf.saved_tensors import observation, packed_tensor
from daf.saved_tensors.ledger import Source, gradient_bytes
from daf.torch_compat.autograd_graph import bytes_of, is_strided, version_of, without_torch_function
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.modules import OwnHook
from daf.torch_compat.pytree import tensors_in_batch

_KEPT_ANYWAY = (Need.EXACT, Need.INPUT)  # needs that only keeping, or placing elsewhere, can serve


class _Input(NamedTuple):
    """A tensor that a call was given, and its version then."""

    call: observation.ModuleCall
    tensor: weakref.ref[Tensor]
    version: int

    def is_alive(self) -> bool:
        """Note whether the tensor was changed in place; False once it is gone."""
        tensor = self.tensor()
        if tensor is not None and version_of(tensor) != self.version:
            self.call.refuse("what it is given is changed in place afterwards")
        return tensor is not None and self.call.replayable


class _OpenCall(NamedTuple):
    """A running module call: when it began, and the time that coding had taken by then."""

    place: int
    start_s: float
    coding_ms: float


@contextmanager
def unseen() -> Iterator[None]:
    """Hide a hook's own reads of tensors from function modes."""
    with without_torch_function():
        yield


class Observer:
    """Fills one ``Observation`` of a step; give it to ``Capture.step``, inside ``watching``."""

    def __init__(self, capture: Capture, examples: int, memory: MemoryDomain | None = None) -> None:
        model, memory = capture.model, memory or ProcessMemory()
        device = device_of(model)
        self.found = observation.Observation(
            examples,
            part_bytes=decoded_bytes_on(device),
            norm_part_bytes=norm_part_bytes_on(device),
        )
        self._model, self._sources = model, capture.sources
        self._release_scratch, self._memory = capture.release_scratch, memory
        self._meter = memory.meter()
        self._gradients = 0
        self._storages: dict[Source, int] = {}
        self._contents: dict[tuple[Any, ...], int] = {}
        self._watched: dict[Source, list[observation.ObservedTensor]] = {}
        self._ours: dict[Source, weakref.WeakSet[packed_tensor.Kept]] = {}
        self._by_saved: dict[int, observation.ObservedTensor] = {}
        self._references: list[weakref.ref[packed_tensor.SavedTensor]] = []
        self._makers: weakref.WeakKeyDictionary[Any, Site] = weakref.WeakKeyDictionary()
        self._open_calls: list[_OpenCall] = []
        self._inputs: list[_Input] = []
        self._coding_ms = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow module calls and gradients; runs around forward and backward."""
        with ExitStack() as hooks:
            hooks.callback(self._end_saves)
            for handle in self._register_hooks():
                hooks.enter_context(handle)
            self._meter.begin()
            start_s = self.now_s()
            try:
                yield
            finally:
                self.found.coded_ms = 1000.0 * (self.now_s() - start_s)
                self.found.step_ms = self.found.coded_ms - self._coding_ms
                if self._begun:
                    self._close_moment()
                self._meter.finish(self.found.peak_bytes)

    def _register_hooks(self) -> Iterator[Any]:
        for path, module in CompiledModules(self._model).replayable():
            enter = OwnHook(partial(self._enter, path))
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(OwnHook(self._leave), always_call=True)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                note = self._note_gradient
                yield parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        """Note that the forward pass is over, the loss included."""
        self.found.forward = len(self.found.gradient_bytes)

    def now_s(self) -> float:
        """Return the time when all work queued on a device so far is done."""
        self._memory.wait()
        return time.perf_counter()

    def moment(self) -> None:
        """Begin a new moment; whatever only autograd holds by now died before it."""
        if self._begun:
            self._close_moment()
        self.found.gradient_bytes.append(self._gradients)
        self._note_deaths()
        self._inputs = [each for each in self._inputs if each.is_alive()]

    def saved(self, save: observation.Save) -> None:
        """Note a saved tensor; one without visible memory of its own is skipped."""
        if not save.sources:
            return
        source = save.sources[0]
        record = observation.ObservedTensor(
            save.site,
            save.need,
            save.treatment,
            self._storages.setdefault(source, len(self._storages)),
            source.nbytes,
            self._content(save, source),
            bytes_of(save.tensor),
            save.tensor.numel(),
            save.held_bytes,
            save.treatable and (save.treatment != KEEP or save.need in _KEPT_ANYWAY),
            self._parents(save),
            self._open_calls[-1].place if self._open_calls else observation.NO_CALL,
            max(0, self._now),
            beside_bytes=save.beside_bytes,
            teller=self._makers.get(save.derived_by) if save.derived_by is not None else None,
        )
        if save.derives is not None:
            self._makers[save.derives] = save.site
        self.found.saves.append(record)
        if save.ms is not None:
            self._time(self.found.encode, save.treatment, record.tensor_bytes, save.ms)
        key = id(save.saved)
        self._by_saved[key] = record
        released = partial(self._note_released, key, record)
        self._references.append(weakref.ref(save.saved, released))
        if save.is_over:
            record.dies = record.saved
        else:
            self._watched.setdefault(source, []).append(record)
        if isinstance(save.held, packed_tensor.Kept):
            self._ours.setdefault(source, weakref.WeakSet()).add(save.held)

    def _content(self, save: observation.Save, source: Source) -> int:
        has_geometry = is_strided(save.tensor)
        key = content_key(save.tensor, save.saved.version) if has_geometry else (save.site,)
        return self._contents.setdefault((source, *key), len(self._contents))

    def recorded(self, ms: float) -> None:
        """Note the time that recording the graph of values took."""
        self.found.recording_ms = ms

    def reading(self, saved: packed_tensor.SavedTensor) -> None:
        """Note that backward reads a tensor."""
        if (record := self._by_saved.get(id(saved))) is None:
            return
        self._release_scratch()  # so that a decoded tensor is alive only as long as it is used
        self.moment()
        if record.read < 0:
            record.read = self._now
            record.reading = _reading(saved)
            if isinstance(saved.held, Recomputed):
                record.recipe = self._recipe(saved.held, record.tensor_bytes)

    def has_read(self, saved: packed_tensor.SavedTensor, ms: float) -> None:
        """Note that backward has read a tensor, and the time that took."""
        record = self._by_saved.get(id(saved))
        if record is not None and not packed_tensor.is_identifying():
            record.read_ms = ms
            self._time(self.found.decode, record.treatment, record.tensor_bytes, ms)

    @property
    def _now(self) -> int:
        return len(self.found.gradient_bytes) - 1

    @property
    def _begun(self) -> bool:
        return len(self.found.peak_bytes) < len(self.found.gradient_bytes)

    def _close_moment(self) -> None:
        self.found.peak_bytes.append(self._meter.take_peak())

    def _note_gradient(self, parameter: Tensor) -> None:
        self._gradients += gradient_bytes(parameter)

    def _note_deaths(self) -> None:
        """Note the deaths of memory that only autograd's kept tensors refer to."""
        gone = []
        for source, records in self._watched.items():
            ours = self._ours.get(source)
            if source.references() <= (len(ours) if ours else 0):
                for record in records:
                    if record.dies < 0:
                        record.dies = self._now
                gone.append(source)
        for source in gone:
            del self._watched[source]

    def _note_released(self, key: int, record: observation.ObservedTensor, _reference: Any) -> None:
        record.released = self._now
        self._by_saved.pop(key, None)

    def _end_saves(self) -> None:
        last = len(self.found.peak_bytes) - 1
        for record in self.found.saves:
            record.released = last if record.released < 0 else record.released
            record.read = record.released if record.read < 0 else record.read
            record.dies = last + 1 if record.dies < 0 else record.dies
        self._references.clear()
        self._by_saved.clear()
        self._watched.clear()
        known = {record.storage for record in self.found.saves}
        for call in self.found.calls:
            call.inputs = [(s if s in known else -1, nbytes) for s, nbytes in call.inputs]

    def _parents(self, save: observation.Save) -> frozenset[Site] | None:
        """Return the sites of the codes that a tensor sums; None if it has its own code."""
        if save.treatment.method is Method.REDERIVE and isinstance(
            save.held, packed_tensor.Rederived
        ):
            recipe = save.held.recipe
            if recipe[0].derivation is not None:
                return None
            parts = [part for term in recipe for part in (term.code, term.mask) if part]
            return frozenset(self._makers[part] for part in parts if part in self._makers)
        for part in _own_codes(save.held):
            self._makers.setdefault(part, save.site)
        return None

    def _recipe(self, held: Recomputed, result_bytes: int) -> observation.ObservedRecipe:
        """Return what a recipe is of; parts of one storage count once, as the ledger has them."""
        sources = [each.source for each in held.leaves if each.source is not None]
        leaves = {self._storages.setdefault(each, len(self._storages)): each for each in sources}
        copies = [each for each in held.leaves if each.source is None and each.holding is not None]
        return observation.ObservedRecipe(
            {number: each.nbytes for number, each in leaves.items()},
            sum(each.value.nbytes for each in copies),
            max(0, held.step.alive_bytes - result_bytes),
        )

    def _time(
        self,
        times: dict[Method, observation.MethodTime],
        treatment: Treatment,
        nbytes: int,
        ms: float,
    ) -> None:
        self._coding_ms += ms
        times.setdefault(treatment.method, observation.MethodTime()).add(nbytes, ms)

    @unseen()
    def _enter(self, path: str, _module: nn.Module, arguments: Any, keywords: Any) -> None:
        parent = self._open_calls[-1].place if self._open_calls else observation.NO_CALL
        call = observation.ModuleCall(path, parent, self._now + 1)
        opened = _OpenCall(len(self.found.calls), self.now_s(), self._coding_ms)
        tensors = list(self._computed((arguments, keywords)))
        call.inputs = self._numbered(tensors)
        self._inputs += [_Input(call, weakref.ref(t), version_of(t)) for t in tensors]
        self._open_calls.append(opened)
        self.found.calls.append(call)

    @unseen()
    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._open_calls:
            return
        opened = self._open_calls.pop()
        call = self.found.calls[opened.place]
        passed_ms = 1000.0 * (self.now_s() - opened.start_s)
        call.forward_ms = max(0.0, passed_ms - (self._coding_ms - opened.coding_ms))
        call.last_moment = max(call.first_moment, self._now)
        call.output_bytes = sum(size for _, size in self._numbered(list(self._computed(output))))

    def _computed(self, nest: Any) -> Iterator[Tensor]:
        for tensor in tensors_in_batch(nest):
            if is_strided(tensor) and not self._sources.is_external(tensor):
                yield tensor

    def _numbered(self, tensors: list[Tensor]) -> list[tuple[int, int]]:
        """Return the distinct memory behind tensors: its number and its bytes."""
        sources = dict.fromkeys(self._sources.of(tensor) for tensor in tensors)
        return [
            (self._storages.setdefault(source, len(self._storages)), source.nbytes)
            for source in sources
        ]


def _reading(saved: packed_tensor.SavedTensor) -> Reading:
    if not packed_tensor.is_identifying():
        return Reading.WHOLE
    if isinstance(saved.held, SmoothHeld):
        return Reading.APART
    return Reading.CHUNKS if isinstance(saved.held, packed_tensor.Rederived) else Reading.IN_PLACE


def _own_codes(held: packed_tensor.PackedTensor) -> Iterator[Any]:
    if (code := getattr(held, "code", None)) is not None:
        yield code
    elif isinstance(held, packed_tensor.Rederived):
        yield held.recipe[0].code
    if (mask := getattr(held, "mask", None)) is not None:
        yield mask
