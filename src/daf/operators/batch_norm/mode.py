"""Running the normalisations that were found to be fusible: most wait until they are read.

A normalisation takes its statistics and returns a *stand-in*: a tensor of NaN
with the right geometry and no memory. The addition and the ReLU recognise it,
and the ReLU computes all three. Every operator that touches a stand-in
otherwise is given the real thing, computed then, when nobody may hold the normalisation's
input any more; where a ReLU was expected, it is not waited for in
later steps. What can no longer be computed raises FusionError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from daf.core.errors import FusionError
from daf.operators.batch_norm.call import objection, read_call
from daf.operators.batch_norm.function import Norm
from daf.operators.batch_norm.pattern import (
    METADATA,
    Fusion,
    NormSite,
    Observation,
    is_norm,
    is_plain_addition,
    with_tensors,
)
from daf.operators.batch_norm.relu import Rectifier, read_rectifier
from daf.saved_tensors.packer import SMALL_BYTES
from daf.torch_compat.operator_mode import Listener, OperatorMode, Substitute


class Carrier(Protocol):
    """What a capture does for fused operators."""

    def pack(self, tensor: Tensor) -> Any:
        """The hook that sees what autograd saves."""

    def norm_site(self) -> NormSite:
        """Where the normalisation that runs now is."""

    def enter_norm(self) -> None:
        """One more of them ran there, and left no trace of its own."""

    def carry(
        self, norm: Norm, site: NormSite, addend: Tensor | None, rectifier: Rectifier | None
    ) -> Tensor:
        """Run the operator; ``rectifier`` is the ReLU function, if one comes last."""


class _Waiting:
    """What a stand-in stands for: a normalisation, perhaps plus an addend."""

    def __init__(self, norm: Norm, site: NormSite, addend: Tensor | None = None) -> None:
        self.site = site
        self.norm: Norm | None = norm
        self.addend = addend
        self.result: Tensor | None = None  # once it was computed
        self._versions = self._present_versions()

    def take(self) -> tuple[Norm, Tensor | None]:
        """The parts, to be computed with now; they are forgotten here.

        Raises:
            FusionError: they are gone, or were changed in place since.
        """
        norm, addend = self.norm, self.addend
        if norm is None:
            raise FusionError(
                f"asked for the result of the batch normalisation at {self.site.module!r} after "
                "its ReLU, which no step before did; its input is gone. "
                "Run without fused operators (fused=False)"
            )
        if self._present_versions() != self._versions:
            raise FusionError(
                f"what the fused batch normalisation at {self.site.module!r} reads was changed in "
                "place before its ReLU ran, which no step before did; "
                "run without fused operators (fused=False)"
            )
        self.norm = self.addend = None
        return norm, addend

    def _present_versions(self) -> tuple[int, ...]:
        if self.norm is None:
            return ()
        parts = (self.norm.x, self.norm.weight, self.norm.bias, self.addend)
        return tuple(part._version for part in parts if part is not None)


class Fusing:
    """The stand-ins of one ``with``, and what becomes of them."""

    def __init__(self, fusion: Fusion, carrier: Carrier) -> None:
        self._fusion = fusion
        self._carrier = carrier
        self._observation = Observation()
        self._waiting: MutableMapping[Tensor, _Waiting] = WeakTensorKeyDictionary()

    # --- what the mode asks -----------------------------------------------------------------

    def norm(self, run: Callable[[], Any], arguments: Sequence[Any], keywords: Any) -> Any:
        """``F.batch_norm``: a stand-in where it is fused, else what ``run`` returns."""
        site = self._carrier.norm_site()
        call = read_call(arguments, keywords)
        reason = "its arguments are odd"
        if call is not None:
            reason = objection(call, self._carrier.pack, SMALL_BYTES)
        if call is not None and not reason and not self._fusion.is_open(site):
            self._carrier.enter_norm()
            if self._fusion.waits(site):
                return self._stand_in(_Waiting(call.start(), site))
            return self._carrier.carry(call.start(), site, None, None)
        result = run()
        if call is None or reason:
            self._observation.refuse(site, reason)
        else:
            self._observation.norm(site, call, result)
        return result

    def follow(
        self, operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Tensor | None:
        """The result of an addition or ReLU that a stand-in waited for; None for all others."""
        if not self._waiting or not torch.is_grad_enabled():
            return None
        rectified = read_rectifier(operator, arguments, keywords)
        if rectified is not None:
            return self._rectify(*rectified)
        if is_plain_addition(operator, arguments, keywords):
            return self._add(operator, *arguments)
        return None

    def real(self, value: Any, reader: str) -> Any:
        """The same value with real tensors in the place of stand-ins; ``reader`` asks for them."""

        def compute(tensor: Tensor) -> Tensor:
            waiting = self._waiting.get(tensor)
            return tensor if waiting is None else self._compute(waiting, reader)

        return with_tensors(value, compute)

    @property
    def is_idle(self) -> bool:
        """Is no stand-in about?"""
        return not self._waiting

    def observe(
        self,
        operator: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        result: Any,
    ) -> None:
        """An operator ran as it is."""
        self._observation.operator(operator, arguments, keywords, result)

    def finish(self) -> None:
        """The step is over: learn from it.

        Raises:
            FusionError: a stand-in is still held by somebody.
        """
        self._fusion.learn(self._observation)
        kept = [waiting.site for waiting in self._waiting.values()]
        for site in kept:
            self._fusion.give_up(site, "its result outlived a step")
        if kept:
            raise FusionError(
                f"the result of the fused batch normalisation at {kept[0].module!r} outlives the "
                "step, which no step before did; that tensor holds NaN. "
                "Run without fused operators (fused=False), or run the step again"
            )

    # --- stand-ins --------------------------------------------------------------------------

    def _stand_in(self, waiting: _Waiting) -> Tensor:
        assert waiting.norm is not None
        x = waiting.norm.x
        nothing = torch.full((), torch.nan, dtype=x.dtype, device=x.device)
        stand_in = nothing.expand(x.shape)
        self._waiting[stand_in] = waiting
        return stand_in

    def _rectify(self, stand_in: Tensor, rectifier: Rectifier) -> Tensor | None:
        waiting = self._waiting.get(stand_in)
        if waiting is None or waiting.result is not None or self._fusion.is_alone(waiting.site):
            return None
        norm, addend = waiting.take()
        result = self._carrier.carry(norm, waiting.site, addend, rectifier)
        if rectifier.is_in_place:
            waiting.result = result
        return result

    def _add(self, operator: Callable[..., Any], first: Tensor, second: Tensor) -> Tensor | None:
        """The stand-in of a sum; the first operand that waits is the one that goes on waiting."""
        waiting, other = self._waiting.get(first), second
        if not _can_wait(waiting):
            if operator.__name__ in _ONTO_FIRST:
                return None
            waiting, other = self._waiting.get(second), first
        if waiting is None or not _can_wait(waiting) or first is second:
            return None
        assert waiting.norm is not None
        beside = self._waiting.get(other)
        addend = other if beside is None else self._compute(beside, "")
        if not _fits(addend, waiting.norm.x):
            return None
        norm, _ = waiting.take()
        total = _Waiting(norm, waiting.site, addend)
        if operator.__name__ not in _ONTO_FIRST:
            return self._stand_in(total)
        self._waiting[first] = total
        return first

    def _compute(self, waiting: _Waiting, reader: str) -> Tensor:
        """The real tensor; with a ``reader`` that was not expected, the place is given up."""
        if waiting.result is None:
            if reader and not self._fusion.is_alone(waiting.site):
                self._fusion.give_up(waiting.site, f"its result was also read by {reader}")
            norm, addend = waiting.take()
            with torch.enable_grad():
                waiting.result = self._carrier.carry(norm, waiting.site, addend, None)
        return waiting.result


_ONTO_FIRST = frozenset({"add_", "__iadd__"})


def _can_wait(waiting: _Waiting | None) -> bool:
    return waiting is not None and waiting.norm is not None and waiting.addend is None


def _fits(addend: Tensor, x: Tensor) -> bool:
    return (
        type(addend) in (Tensor, torch.nn.Parameter)
        and addend.dtype is x.dtype
        and addend.device == x.device
        and addend.stride() == x.stride()
        and not addend.is_neg()
    )


class FusingMode(OperatorMode):
    """An operator mode that lets fused normalisations wait."""

    def __init__(self, listener: Listener, substitute: Substitute | None, fusing: Fusing) -> None:
        super().__init__(listener, substitute)
        self._fusing = fusing

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, or let it wait; PyTorch calls this."""
        keywords, fusing = kwargs or {}, self._fusing
        if func in METADATA:
            return func(*args, **keywords)
        done = fusing.follow(func, args, keywords)
        if done is not None:
            return done
        if not fusing.is_idle:
            name = getattr(func, "__name__", str(func))
            args, keywords = fusing.real(args, name), fusing.real(dict(keywords), name)

        def run() -> Any:
            return super(FusingMode, self).__torch_function__(func, types, args, keywords)

        if is_norm(func):
            return fusing.norm(run, args, keywords)
        result = run()
        fusing.observe(func, args, keywords, result)
        return result
