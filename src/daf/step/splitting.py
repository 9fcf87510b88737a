"""Whether and how a session cuts its batches: asked, then proven, then remembered.

A choice holds for batches of one structure under one loss function, while the same parts of the
model train. Another loss or structure is proven anew.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import nn

from daf.core.errors import OptionError
from daf.step.batch_cut import WHOLE, BatchCut, BatchDim, BatchSplit, possible_cuts
from daf.step.loss_weights import Weighing
from daf.torch_compat.modules import modules_of, parameters_of
from daf.torch_compat.pytree import tensors_in_batch, tensors_inside

Split = bool | Literal["auto"] | BatchSplit
NOT_PROVEN = "nothing has shown yet that its parts add up to the whole"
NO_ROOM_TO_PROVE = (
    "the budget has no room to show that its parts add up to it (split=True asserts that they do)"
)
FORBIDDEN = "split=False was asked for"


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """How a batch is cut to measure and train; ``refusal``: why training never cuts it, or "".

    ``functions``: those of PyTorch that the proof saw (others are not proven; empty: nothing is).
    ``proof_bytes``: the least budget that has room to prove it, 0 if none is needed or known.
    ``alike``: which of the batch's tensors had one value for all examples, by place.
    """

    cut: BatchCut
    weighing: Weighing = Weighing.EXAMPLES
    refusal: str = ""
    functions: frozenset[str] = frozenset()
    proof_bytes: int = 0
    alike: frozenset[int] = frozenset()


class Splitting:
    """A session's choices, by what they were proven for.

    Args:
        split: "auto": cut what is proven; True: the user's word stands in for the proof; False:
            never; or the user's own way of cutting.
        batch_dim: the dimension of examples; one for each field of the batch; None: found.

    Raises:
        OptionError: ``split`` is none of these.
    """

    def __init__(self, split: Split = "auto", batch_dim: BatchDim = None) -> None:
        if split not in ("auto", True, False) and not isinstance(split, BatchSplit):
            raise OptionError(
                f"asked for split={split!r}; it is 'auto', True, False or a BatchSplit of two "
                "functions"
            )
        self.split = split
        self.forbidden_because = FORBIDDEN  # where ``split`` is False
        self.batch_dim = batch_dim
        self._proven: dict[Hashable, SplitChoice] = {}
        self._resumed: SplitChoice | None = None

    def cuts(self, batch: Any) -> Iterator[BatchCut]:
        """Yield ways to cut the batch, the likeliest first; raises as ``possible_cuts``."""
        if isinstance(self.split, BatchSplit):
            yield BatchCut(own=self.split)
        else:
            yield from possible_cuts(batch, self.batch_dim)

    def choice(self, kind: Hashable, batch: Any) -> SplitChoice:
        """Return what was proven for this kind; else a cut to measure with, never to train."""
        known = self._proven.get(kind) or self._resumed
        if known is not None:
            self._proven[kind], self._resumed = known, None
            return known
        return SplitChoice(next(self.cuts(batch), WHOLE), refusal=NOT_PROVEN)

    def remember(self, kind: Hashable, choice: SplitChoice) -> None:
        """Use this choice for batches of this kind from now on."""
        self._proven[kind] = choice

    def forget(self) -> None:
        """Prove everything anew."""
        self._proven.clear()
        self._resumed = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the last choice (JSON-able), which a resumed run takes for its first batch."""
        choice = next(reversed(self._proven.values()), self._resumed)
        if choice is None or choice.cut.own is not None:
            return None
        cut = {"dims": list(choice.cut.dims), "least": choice.cut.least}
        told = {"weighing": choice.weighing.value, "refusal": choice.refusal}
        return cut | told | {"functions": sorted(choice.functions), "alike": [*choice.alike]}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from ``state_dict``."""
        if state is not None:
            cut = BatchCut(tuple(state["dims"]), state["least"])
            weighing, functions = Weighing(state["weighing"]), frozenset(state["functions"])
            alike = frozenset(state.get("alike", ()))
            self._resumed = SplitChoice(cut, weighing, state["refusal"], functions, alike=alike)


def kind_of(model: nn.Module, batch: Any, loss_fn: Callable[..., Any]) -> Hashable:
    """Return what a proof holds for: the batch's structure, the loss's code, what trains."""
    tensors = tuple((each.dim(), each.dtype) for each in tensors_in_batch(batch))
    modules = modules_of(model)
    flags = (tuple(each.training for each in modules),)
    trained = tuple(each.requires_grad for each in parameters_of(model, modules))
    return type(batch), tensors, (*_called_by(loss_fn),), flags, trained


def proof_key(model: nn.Module, batch: Any, loss_fn: Callable[..., Any]) -> str:
    """Return a digest that changes with all that a proof depends on, but values and sizes."""
    facts = [torch.__version__, _own_version(), type(batch).__qualname__]
    facts += [f"{each.dim()} {each.dtype}" for each in tensors_inside(batch)]
    facts += chain.from_iterable(map(_words_of, _called_by(loss_fn)))
    for name, module in model.named_modules():
        facts += [name, type(module).__qualname__, str(module.training)]
    kinds = {type(each) for each in model.modules()}
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        # A scripted module's class has no forward before it is made.
        forwards = (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
        facts += _words_of(getattr(next(forwards, kind), "__code__", kind))
    facts += [f"{name} {each.requires_grad}" for name, each in model.named_parameters()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _own_version() -> str:
    try:
        return version("daf-train")
    except PackageNotFoundError:
        return ""


def _called_by(function: Any) -> Iterator[CodeType | type]:
    """Yield the code of a function and of those that it calls; of other callables, their class."""
    # Those are what it wraps or closes over, and functions of its own module by their names.
    waiting, seen = [function], set[int]()
    while waiting:
        each = waiting.pop()
        each = getattr(each, "__func__", each)
        if isinstance(each, partial):
            waiting += filter(callable, (*each.args, each.func))
            continue
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield getattr(each, "__code__", type(each))
        if isinstance(each, FunctionType):
            waiting += _named_in(each)
        elif "__call__" in vars(type(each)):
            waiting.append(vars(type(each))["__call__"])


def _named_in(function: FunctionType) -> Iterator[Any]:
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield wrapped
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            if callable(cell.cell_contents):
                yield cell.cell_contents
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if isinstance(found, FunctionType) and found.__module__ == function.__module__:
            yield found


def _words_of(called: CodeType | type) -> Iterator[str]:
    """Yield what code says; of a class, its name."""
    if isinstance(called, CodeType):
        yield called.co_qualname
        yield from code_words(called)
    else:
        yield called.__qualname__


def code_words(code: CodeType) -> Iterator[str]:
    """Yield what code does, and the names and constants that it does it with."""
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_words(constant)
        else:  # sets have another order in every process
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
