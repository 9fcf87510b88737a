"""What a module keeps in Python: attributes of its parts; lists, dictionaries, objects among them.

A call may count its calls, fill a cache, put a result aside or draw from a generator of its own.
Its second run begins with what the first one found, and leaves no trace.
"""

import math
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from logging import Logger
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from daf.recompute.random_state import OwnGenerator
from daf.torch_compat.autograd_graph import version_of
from daf.torch_compat.modules import modules_of, parameters_of

_MISSING = object()
# PyTorch's own entries, and those that whoever replaces a forward sets.
_NOT_STATE = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
_UNCHANGING = frozenset({bool, int, float, str, bytes, tuple, type(None), torch.Size})
_WITHOUT_GRAPH = _UNCHANGING | {dict, OrderedDict, set, list}
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_WITHOUT_STATE = (
    *(nn.Module, Tensor, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(torch.dtype, torch.device, Logger),
)
_DEEPEST = 3  # containers and objects inside each other
_MOST_ENTRIES_ELSEWHERE = 4096
_MOST_ENTRIES = 64  # of a container whose entries are looked into


class Change(NamedTuple):
    """A dictionary's entry that had another value; ``_MISSING``: none."""

    space: MutableMapping[str, Any]
    name: str
    value: Any

    def undo(self) -> None:
        """Set the value that it had."""
        if self.value is _MISSING:
            self.space.pop(self.name, None)
        else:
            self.space[self.name] = self.value


class Contents(NamedTuple):
    """A container whose entries were others."""

    container: Any
    entries: Any

    def undo(self) -> None:
        """Give it the entries that it had."""
        into, entries = self.container, self.then()
        into.clear()
        (into.extend if isinstance(into, (list, deque)) else into.update)(entries)

    def then(self) -> Any:
        """Return the entries that it had: a mapping, or a list of them."""
        if isinstance(self.entries, dict):
            return {name: _found(each) for name, each in self.entries.items()}
        return [_found(each) for each in self.entries]


Undo = Change | Contents | OwnGenerator


class _WithGraph:
    """A tensor whose graph is freed as without this; its value is held."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._value = weakref.ref(tensor), tensor.detach()

    def found(self) -> Tensor:
        """Return the tensor, or its value alone where nobody else kept it."""
        tensor = self._tensor()
        return self._value if tensor is None else tensor


class PythonState:
    """What modules and other ``objects`` keep in Python now.

    ``holds_tensors`` False holds no graph, so that each is freed as without this: of a tensor with
    one, the value is held. Containers of more than ``most_entries`` are left alone.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        objects: Iterable[Any] = (),
        *,
        holds_tensors: bool = True,
        most_entries: float = math.inf,
    ) -> None:
        self._spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[Contents] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._generators: list[OwnGenerator] = []
        self._seen: set[int] = set()
        self._holds_tensors, self._most_entries = holds_tensors, most_entries
        for part in modules:
            if isinstance(part, LazyModuleMixin):
                continue  # its first pass builds it
            space = vars(part)
            names = () if _is_of_torch(type(part)) else space.keys() - _NOT_STATE
            self._spaces.append((space, self._held(space)))
            for name in names:
                if type(space[name]) not in _UNCHANGING:
                    self._look(name, space[name], 0)
        for each in objects:
            self._look(type(each).__name__, each, 0)

    def _held(self, space: dict[str, Any]) -> dict[str, Any]:
        held = dict(space)
        if not self._holds_tensors:
            values = [each for each in held.items() if type(each[1]) not in _WITHOUT_GRAPH]
            held |= {name: _WithGraph(value) for name, value in values if _has_graph(value)}
        return held

    def _entries(self, container: Any) -> Any:
        if isinstance(container, dict):
            return self._held(container)
        hides = not self._holds_tensors
        return [_WithGraph(each) if hides and _has_graph(each) else each for each in container]

    def _look(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if self._holds_tensors:
                self._tensors.append((name, value, version_of(value)))
        elif type(value) in _CONTAINERS:
            if self._is_new(value, depth):
                self._look_into(name, value, depth)
        elif (
            isinstance(value, _WITHOUT_STATE)
            or not self._is_new(value, depth)
            or type(value).__module__.startswith("daf.")
        ):
            return
        elif (generator := OwnGenerator.of(value)) is not None:
            self._generators.append(generator)
        elif hasattr(value, "__dict__"):
            own = self._held(vars(value))
            self._spaces.append((vars(value), own))
            self._look_at(name, own.values(), depth)

    def _look_into(self, name: str, container: Any, depth: int) -> None:
        values = container.values() if isinstance(container, dict) else container
        if len(container) > self._most_entries:
            return
        self._contents.append(Contents(container, self._entries(container)))
        if len(container) <= _MOST_ENTRIES:
            self._look_at(name, values, depth)

    def _look_at(self, name: str, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if type(value) not in _UNCHANGING:
                self._look(name, value, depth + 1)

    def _is_new(self, value: Any, depth: int) -> bool:
        if depth > _DEEPEST or id(value) in self._seen:
            return False
        self._seen.add(id(value))
        return True

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors among what was found: no parameters, no buffers."""
        return (tensor for _, tensor, _ in self._tensors)

    def written(self) -> str:
        """Return the attribute whose tensor was changed in place since; empty if none was."""
        return next((name for name, each, then in self._tensors if version_of(each) != then), "")

    def changes(self) -> list[Undo]:
        """Return what differs now, with what it was."""
        found: list[Undo] = []
        for space, own in self._spaces:
            found += _changes_in(space, own)
        found += [each for each in self._generators if each.is_used()]
        return found + [each for each in self._contents if _has_other_entries(each)]

    def has_drawn(self) -> bool:
        """True if a generator among what was found was drawn from since."""
        return any(each.is_used() for each in self._generators)

    def restore_generators(self) -> None:
        """Set generators to their states."""
        for each in self._generators:
            each.undo()

    def put_back(self) -> None:
        """Undo what was changed since, but in tensors."""
        for change in self.changes():
            change.undo()


class Surroundings(NamedTuple):
    """A model's modules and parameters now, and what they and a function name elsewhere.

    That is globals, what hooks and functions in attributes close over, and the objects whose
    methods they are. One walk finds it all.
    """

    model: nn.Module
    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    named: list[Any]

    @classmethod
    def of(cls, model: nn.Module, function: Any = None) -> "Surroundings":
        """Walk over a model; ``function``: a loss, say."""
        modules = modules_of(model)
        parameters = parameters_of(model, modules)
        return cls(model, modules, parameters, _named_elsewhere(modules, function))

    def parameters_elsewhere(self) -> list[nn.Parameter]:
        """Return the parameters of modules beside the model's that are named."""
        modules = [each for each in self.named if isinstance(each, nn.Module)]
        found = {id(each): each for module in modules for each in parameters_of(module)}
        own = {id(each) for each in self.parameters} if found else ()
        return [each for key, each in found.items() if key not in own]

    def state_elsewhere(self, *, holds_tensors: bool = True) -> PythonState:
        """Return the state of what is named elsewhere."""
        modules = [each for each in self.named if isinstance(each, nn.Module)]
        others = [part for each in modules if each not in self.modules for part in modules_of(each)]
        return PythonState(
            dict.fromkeys(others),
            self.named,
            holds_tensors=holds_tensors,
            most_entries=_MOST_ENTRIES_ELSEWHERE,
        )


def is_other_value(change: Undo) -> bool:
    """True if a number or tensor is another than it was; other objects may say the same."""
    if not isinstance(change, Change):
        return False
    now, then = change.space.get(change.name), change.value
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.shape == then.shape and not torch.equal(now, then)
    return isinstance(now, (int, float)) and isinstance(then, (int, float)) and now != then


def _named_elsewhere(modules: list[nn.Module], function: Any) -> list[Any]:
    found = {id(value): value for value in _reached_by(function)}
    for kind in {*map(type, modules)}:
        for space, name in _globals_named(kind):
            found[id(space.get(name))] = space.get(name)
    for part in modules:
        space = vars(part)
        own = (space.get("forward"),) if _is_of_torch(type(part)) else space.values()
        functions: list[Any] = [each for each in own if isinstance(each, (FunctionType, partial))]
        functions += part._forward_pre_hooks.values()
        functions += part._forward_hooks.values()
        for function in functions:
            found |= {id(value): value for value in _reached_by(function)}
    return [*found.values()]


def _reached_by(hook: Any) -> Iterator[Any]:
    function = getattr(hook, "func", hook)  # of a partial
    yield getattr(function, "__self__", function)
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield cell.cell_contents
        for name in names_in(function.__code__):
            yield function.__globals__.get(name)


def _found(value: Any) -> Any:
    return value.found() if isinstance(value, _WithGraph) else value


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


@lru_cache(maxsize=1024)
def _globals_named(kind: type) -> tuple[tuple[dict[str, Any], str], ...]:
    own = [vars(base).values() for base in kind.__mro__ if not _is_of_torch(base)]
    functions = [each for values in own for each in values if isinstance(each, FunctionType)]
    return tuple((each.__globals__, name) for each in functions for name in names_in(each.__code__))


@lru_cache(maxsize=1024)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names that code and the functions inside it use."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return code.co_names + tuple(chain.from_iterable(inner))


def _is_of_torch(kind: type) -> bool:
    """True if this is a module of PyTorch's own: none keeps state in containers."""
    return kind.__module__.startswith("torch.nn.modules.")


def _changes_in(space: dict[str, Any], own: dict[str, Any]) -> Iterator[Change]:
    if _are_same(space, own):
        return
    for name in (space.keys() | own.keys()) - _NOT_STATE:
        then = _found(own.get(name, _MISSING))
        if space.get(name, _MISSING) is not then:
            yield Change(space, name, then)


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if both have the same entries, as fast as can be; False if some may differ."""
    try:
        return one == other  # entries are compared by identity first
    except (RuntimeError, ValueError, TypeError):  # of tensors and arrays, which are others
        return False


def _has_other_entries(found: Contents) -> bool:
    now, then = found.container, found.then()
    if len(now) != len(then):
        return True
    if isinstance(now, set):
        return bool(now != {*then})
    if isinstance(now, dict):
        now, then = [*now, *now.values()], [*then, *then.values()]
    return any(a is not b for a, b in zip(now, then, strict=True))
