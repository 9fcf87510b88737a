"""What a module call reads, so that it can run again as it did: its inputs, and the rest.

That is random state, autocast state, which parts were training or frozen, buffers, and what parts
and objects among the inputs (caches) keep in Python. A second run leaves all of it as it found it:
running statistics and counters advance once, and the caller's random numbers are not used up.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.recompute.python_state import PythonState, Undo
from daf.recompute.random_state import Generators
from daf.recompute.watched_forward import WatchedForward
from daf.saved_tensors.packed_tensor import PackedTensor
from daf.torch_compat.autograd_graph import StorageReference, is_strided, strided_parts, version_of
from daf.torch_compat.modules import modules_of
from daf.torch_compat.pytree import map_nest, tensors_in_batch


class _Place(NamedTuple):
    """The place of a tensor in the nest of a call's inputs."""

    number: int


class _Input(NamedTuple):
    """One tensor among a call's inputs."""

    held: PackedTensor
    account: Any
    requires_grad: bool
    original: Callable[[], Tensor | None]
    version: int


class HeldInput(NamedTuple):
    """What holds one input; ``is_exact``: it comes back bit for bit.

    ``account`` keeps it counted.
    """

    held: PackedTensor
    account: Any
    is_exact: bool


class Inputs:
    """The inputs of a call, tensors held; one that appears twice is held once.

    ``are_exact`` is True if all of them come back bit for bit.
    """

    def __init__(self, nest: Any, hold: Callable[[Tensor, int], HeldInput]) -> None:
        places: dict[int, _Place] = {}
        self._tensors: list[_Input] = []
        self.are_exact = True

        def replace(tensor: Tensor) -> _Place:
            if (place := places.get(id(tensor))) is None:
                place = places[id(tensor)] = _Place(len(self._tensors))
                held, account, is_exact = hold(tensor, place.number)
                self.are_exact &= is_exact
                original = weakref.ref(tensor)
                self._tensors.append(
                    _Input(held, account, tensor.requires_grad, original, version_of(tensor))
                )
            return place

        self._nest = map_nest(Tensor, replace, nest)

    def restore(self, scratch: Scratch) -> Any:
        """Return the nest, its tensors detached from the graph that made them."""
        tensors = [
            one.held.restore(scratch).detach().requires_grad_(one.requires_grad)
            for one in self._tensors
        ]
        return map_nest(_Place, lambda place: tensors[place.number], self._nest)

    def check_unchanged(self, path: str) -> None:
        """Raise SavedTensorError if the call, which has returned, changed an input in place."""
        for one in self._tensors:
            tensor = one.original()
            if tensor is not None and version_of(tensor) != one.version:
                raise SavedTensorError(
                    f"asked to replay {path!r}, whose forward pass modified its input of shape "
                    f"{tuple(tensor.shape)} by an inplace operation, so that it cannot be run "
                    "again from it; replay the module around it, or let it work out of place"
                )


def distinct_tensors(nest: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nest once, in order."""
    return iter({id(tensor): tensor for tensor in tensors_in_batch(nest)}.values())


Slot = tuple[int, str]  # the id of a module's own dictionary, and a name in it


class _Seen(NamedTuple):
    """One tensor as it was when the call returned."""

    what: str
    name: str
    space: Mapping[str, Any]
    tensor: weakref.ref[Tensor]
    storages: tuple[StorageReference, ...]  # which keep an address from being given to another
    version: int
    requires_grad: bool

    @classmethod
    def now(cls, what: str, name: str, space: Mapping[str, Any], tensor: Tensor) -> "_Seen":
        parts = strided_parts(tensor)
        storages = tuple(StorageReference(part.untyped_storage()) for part in parts)
        version, gradient = version_of(tensor), tensor.requires_grad
        return cls(what, name, space, weakref.ref(tensor), storages, version, gradient)

    def is_replaced(self) -> bool:
        then = self.tensor()
        now = self.space.get(self.name)
        if then is None or now is not then:
            return True
        there = [part.untyped_storage()._cdata for part in strided_parts(now)]
        return there != [*self.storages]


class ModuleTensors:
    """The tensors that one call may read: make it before the call, ``finish`` it after.

    A second run reads parameters, buffers and what hooks have set on the module as they are then. A
    tensor that was replaced or changed since would silently give another gradient: it is refused.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self._module, self._path = module, path
        self._attributes = dict(_own_attributes(module))
        self._seen: list[_Seen] = []

    def finish(self, unchanged: Collection[Slot]) -> None:
        """End the call; it sets buffers other than ``unchanged`` again itself."""
        for name, part in self._module.named_modules():
            prefix = f"{name}." if name else ""
            for own, parameter in part._parameters.items():
                self._see("parameter", prefix + own, part._parameters, own, parameter)
            for own, buffer in part._buffers.items():
                if (id(part._buffers), own) in unchanged:
                    self._see("buffer", prefix + own, part._buffers, own, buffer)
        for own, tensor in _own_attributes(self._module):
            if self._attributes.get(own) is tensor:
                self._see("attribute", own, vars(self._module), own, tensor)
        self._attributes.clear()

    def _see(
        self, what: str, path: str, space: Mapping[str, Any], name: str, tensor: Tensor | None
    ) -> None:
        if tensor is not None and not is_lazy(tensor):
            self._seen.append(_Seen.now(f"{what} {path!r}", name, space, tensor))

    def check_unchanged(self) -> None:
        """Check that everything is as the call left it; SavedTensorError if it is not."""
        for seen in self._seen:
            if seen.is_replaced():
                raise SavedTensorError(
                    f"asked to replay {self._path!r}, but its {seen.what} was replaced by another "
                    "tensor since its forward pass (by an assignment, a hook or functional_call); "
                    "replay the module around what replaces it, or do not replay this module"
                )
            now = seen.tensor()
            if now is not None and version_of(now) != seen.version:
                raise SavedTensorError(
                    f"asked to replay {self._path!r}, but its {seen.what} has been modified by an "
                    "inplace operation since its forward pass; change buffers and step the "
                    "optimizer after backward, or do not replay this module"
                )

    def freeze_as_then(self, stack: ExitStack) -> None:
        """Let exactly those tensors require gradients that did in the first pass, until it ends."""
        for seen in self._seen:
            tensor, then = seen.tensor(), seen.requires_grad
            if tensor is not None and tensor.requires_grad != then:
                stack.callback(tensor.requires_grad_, not then)
                tensor.requires_grad_(then)


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what forward pre-hooks, which a replay does not run, may have set."""
    if module._forward_pre_hooks:
        yield from ((k, v) for k, v in vars(module).items() if isinstance(v, Tensor))


Count = Callable[[int], Any]  # counts bytes for as long as what it returns lives
# A call may write a buffer and leave its value (a mean of 0): in a small one that can be chance.
MOST_BYTES_SAME_BY_CHANCE = 64 * 2**10


class CallState:
    """The state before a call: ``finish`` it afterwards, ``restored`` runs the call again."""

    def __init__(
        self,
        target: WatchedForward,
        generators: Generators,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> None:
        module = target.module
        inputs = (*arguments, *keywords.values())
        tensors = (*distinct_tensors(inputs), *module.parameters())
        devices = {each.device for each in tensors}
        self._module, self._path = module, target.path
        self._objects = tuple(each for each in inputs if _is_object(each))
        self._training = tuple(part.training for part in module.modules())
        self._tensors = ModuleTensors(module, target.path)
        self._autocast = [_autocast_now(kind) for kind in {"cpu"} | {d.type for d in devices}]
        self._random = generators.state(device for device in devices if device.type == "cuda")
        self._python: PythonState | None = PythonState(modules_of(module), self._objects)
        self._changes: list[Undo] = []
        self._buffers = list(_copies_of_buffers(module))
        self._maybe_written: list[tuple[nn.Module, str]] = []
        self._counts: list[Any] = []

    def finish(self, count: Count) -> None:
        """End the call: keep of its beginning only what it changed, and count those bytes.

        SavedTensorError: the call changed a tensor in place that cannot be restored.
        """
        self._random = self._random.used()
        self._finish_python()
        same = [buffer for buffer in self._buffers if not buffer.is_changed()]
        unchanged = {buffer.slot for buffer in same}
        self._buffers = [buffer for buffer in self._buffers if buffer.slot not in unchanged]
        self._maybe_written = [
            (buffer.owner, buffer.name)
            for buffer in same
            if buffer.value.nbytes <= MOST_BYTES_SAME_BY_CHANCE
        ]
        self._tensors.finish(unchanged)
        held = (self._random.nbytes, *(buffer.value.nbytes for buffer in self._buffers))
        self._counts = [count(nbytes) for nbytes in held if nbytes]

    def _finish_python(self) -> None:
        assert self._python is not None
        if written := self._python.written():
            raise SavedTensorError(
                f"asked to replay {self._path!r}, whose forward pass changed the tensor in its "
                f"attribute {written!r} in place, so that it cannot be run again from what it "
                "found; register that tensor as a buffer, or replay other modules"
            )
        self._changes = self._python.changes()
        self._python = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore everything as it was when the call began; at the end as it is now.

        SavedTensorError: a tensor of the module was changed or replaced since.
        """
        self._tensors.check_unchanged()
        with ExitStack() as stack:
            stack.enter_context(self._random.restored())
            for then in self._autocast:
                if then["enabled"] or torch.is_autocast_enabled(then["device_type"]):
                    stack.enter_context(torch.autocast(**then))
            for part, training in zip(self._module.modules(), self._training, strict=True):
                if part.training != training:
                    stack.callback(setattr, part, "training", part.training)
                    part.training = training
            self._tensors.freeze_as_then(stack)
            stack.enter_context(self._buffers_restored())
            stack.callback(PythonState(modules_of(self._module), self._objects).put_back)
            for change in self._changes:
                change.undo()
            stack.enter_context(torch.enable_grad())
            yield

    @contextmanager
    def _buffers_restored(self) -> Iterator[None]:
        """Put copies in place of buffers, which keep their values and versions."""
        now = [(part._buffers, dict(part._buffers)) for part in self._module.modules()]
        copies: dict[int, Tensor] = {}
        try:
            for buffer in self._buffers:
                copy = copies.setdefault(id(buffer.value), buffer.value.clone())
                buffer.owner._buffers[buffer.name] = copy
            for owner, name in self._maybe_written:
                if (value := owner._buffers[name]) is not None:
                    owner._buffers[name] = copies.setdefault(id(value), value.clone())
            yield
        finally:
            for buffers, entries in now:
                buffers.clear()
                buffers.update(entries)


def _is_object(value: Any) -> bool:
    """True if ``Inputs`` makes no copy of this: of a cache, or a list without tensors as yet."""
    if isinstance(value, (list, Mapping)) or is_dataclass(value):
        return next(distinct_tensors(value), None) is None
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, tuple))


class _Buffer(NamedTuple):
    """One buffer's value before the call."""

    owner: nn.Module
    name: str
    value: Tensor
    original: weakref.ref[Tensor]

    @property
    def slot(self) -> Slot:
        return id(self.owner._buffers), self.name

    def is_changed(self) -> bool:
        """True if the value changed: batch norm and ``.data`` leave the version as it is."""
        now = self.owner._buffers.get(self.name)
        return now is None or now is not self.original() or not torch.equal(now, self.value)


def _copies_of_buffers(module: nn.Module) -> Iterator[_Buffer]:
    copies: dict[int, Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is None or not is_strided(buffer):
                continue
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            yield _Buffer(part, name, copies[id(buffer)], weakref.ref(buffer))


def _autocast_now(kind: str) -> dict[str, Any]:
    """Return autocast's state for one kind of device, as ``torch.autocast`` takes it."""
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
