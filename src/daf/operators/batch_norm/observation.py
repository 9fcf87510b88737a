"""Observes where batch normalisation, addition and ReLU can be one operator."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from daf.operators.batch_norm.function import NormArguments
from daf.operators.fusion_table import CallSite
from daf.operators.protocol import OperatorCall
from daf.saved_tensors.provenance import ADDITIONS, RELUS
from daf.torch_compat.pytree import tensors_in_batch

ALONE = "batch_norm"
WITH_RELU = "batch_norm + relu"
WITH_RELU6 = "batch_norm + relu6"
WITH_ADDITION = "batch_norm + add + relu"
WITH_ADDITION_6 = "batch_norm + add + relu6"
_BOUNDED = frozenset({F.hardtanh, F.hardtanh_})
_SIX = 6.0


class Rectifier(NamedTuple):
    """A ReLU of this name, whose result is at most ``most``."""

    name: str
    most: float = math.inf
    is_in_place: bool = False

    @property
    def is_bounded(self) -> bool:
        """True if the result has an upper bound."""
        return self.most < math.inf


def read_rectifier(
    operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Tensor, Rectifier] | None:
    """Return (input, rectifier) of a call; None where it is none, or its arguments are odd."""
    if operator not in RELUS and operator not in _BOUNDED and operator is not F.relu6:
        return None
    bounds = ("min_val", "max_val") if operator in _BOUNDED else ()
    named = dict(zip(("input", *bounds, "inplace"), arguments, strict=False)) | dict(keywords)
    x, name = named.get("input"), operator.__name__
    if not isinstance(x, Tensor) or len(arguments) > 2 + len(bounds):
        return None
    most = _SIX if operator is F.relu6 else math.inf
    if bounds:
        least, most = named.get("min_val", -1.0), named.get("max_val", 1.0)
        if least != 0 or not 0 < most < math.inf:
            return None
    return x, Rectifier(name, float(most), bool(named.get("inplace")) or name.endswith("_"))


def is_plain_addition(
    operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> bool:
    """True if this adds two tensors of one shape and dtype, and nothing else."""
    if operator not in ADDITIONS or keywords or len(arguments) != 2:
        return False
    first, second = arguments
    are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return are_tensors and (first.shape, first.dtype) == (second.shape, second.dtype)


@dataclass(eq=False)
class _Seen:
    """A watched result: a normalisation's, or a sum that has one as its part."""

    parts: dict[weakref.ref[Tensor], int]  # what it was computed from, at which version
    result: weakref.ref[Tensor]
    readers: "list[str | Rectifier | _Seen]" = field(default_factory=list)
    trouble: str = ""  # why it must be computed at once

    def read_by(self, reader: str | Rectifier) -> None:
        """Note a reader; too late if a part has changed."""
        self.readers.append(reader)
        if self.is_changed():
            self.trouble = f"changed before {_name(reader)}"

    def is_changed(self) -> bool:
        """True if a part was changed in place since."""
        alive = ((part(), version) for part, version in self.parts.items())
        return any(part is not None and part._version != version for part, version in alive)


class Verdict(NamedTuple):
    """What a normalisation is fused with, why with no more, and whether it may be deferred."""

    site: CallSite
    pattern: str
    reason: str
    deferred: bool


class Observation:
    """The readers of one step's normalisations."""

    def __init__(self) -> None:
        self._norms: dict[CallSite, _Seen | str] = {}
        self._watched: dict[int, _Seen] = {}

    def refuse(self, site: CallSite, reason: str) -> None:
        """Note why this normalisation cannot be fused."""
        self._norms[site] = reason

    def norm(self, site: CallSite, arguments: NormArguments, result: Tensor) -> None:
        """Watch the result of a normalisation that could be fused."""
        if site in self._norms:
            self.refuse(site, "it runs several times in a step")
        else:
            self._norms[site] = self._watch((arguments.input,), result)

    def operator(self, call: OperatorCall, result: Any) -> None:
        """Note the tensors that any other operator read."""
        if not self._watched:
            return
        operator, arguments, keywords = call
        found = map(self._find, tensors_in_batch((arguments, keywords)))
        read = {id(seen): seen for seen in found if seen}
        if not read:
            return
        rectified = read_rectifier(operator, arguments, keywords)
        if rectified is not None and isinstance(result, Tensor):
            x, rectifier = rectified
            next(iter(read.values())).read_by(rectifier)
            if result is x:
                del self._watched[id(result)]  # it holds something else now
        elif is_plain_addition(operator, arguments, keywords) and isinstance(result, Tensor):
            self._added(tuple(read.values()), arguments, result)
        else:
            for seen in read.values():
                seen.read_by(call.name)

    def objections(self) -> Iterator[tuple[CallSite, str]]:
        """Return what could not be fused in this step, and why."""
        return ((site, seen) for site, seen in self._norms.items() if isinstance(seen, str))

    def verdicts(self) -> Iterator[Verdict]:
        """Yield what is fused with what, once the step is over."""
        for site, seen in self._norms.items():
            if isinstance(seen, _Seen):
                yield Verdict(site, *_judge(seen), _may_wait(seen))

    def _watch(self, parts: Sequence[Tensor], result: Tensor) -> _Seen:
        seen = _Seen({weakref.ref(part): part._version for part in parts}, weakref.ref(result))
        self._watched[id(result)] = seen
        return seen

    def _find(self, tensor: Tensor) -> _Seen | None:
        seen = self._watched.get(id(tensor))
        return seen if seen is not None and seen.result() is tensor else None

    def _added(self, read: tuple[_Seen, ...], arguments: Sequence[Any], result: Tensor) -> None:
        changed = any(seen.is_changed() for seen in read)
        parts = [part for seen in read for place in seen.parts if (part := place()) is not None]
        onto_other = any(result is each and self._find(each) is None for each in arguments)
        others = [each for each in arguments if self._find(each) is None and each is not result]
        total = self._watch((*parts, *others), result)
        if changed or onto_other:
            total.trouble = "changed before add" if changed else "added onto another tensor"
        for seen in read:
            seen.readers.append(total)


def _judge(seen: _Seen) -> tuple[str, str]:
    """Return (pattern, reason why no more is fused)."""
    reason = _objection(seen)
    behind = seen.readers[0] if len(seen.readers) == 1 and not reason else None
    if isinstance(behind, Rectifier):
        return WITH_RELU6 if behind.is_bounded else WITH_RELU, ""
    if not isinstance(behind, _Seen):
        return ALONE, reason or f"its result is read by {_names(seen)}"
    reason = _objection(behind)
    last = behind.readers[0] if len(behind.readers) == 1 and not reason else None
    if isinstance(last, Rectifier):
        return WITH_ADDITION_6 if last.is_bounded else WITH_ADDITION, ""
    return ALONE, reason or f"its sum is read by {_names(behind)}"


def _objection(seen: _Seen) -> str:
    return "its result outlives the step" if seen.result() is not None else seen.trouble


def _may_wait(seen: _Seen) -> bool:
    sums = (reader for reader in seen.readers if isinstance(reader, _Seen))
    return bool(seen.readers) and not _objection(seen) and all(map(_may_wait, sums))


def _names(seen: _Seen) -> str:
    return ", ".join(map(_name, seen.readers)) or "nobody"


def _name(reader: str | Rectifier | _Seen) -> str:
    if isinstance(reader, Rectifier):
        return reader.name
    return "add" if isinstance(reader, _Seen) else reader
