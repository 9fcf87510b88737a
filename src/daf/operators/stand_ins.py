"""Stand-ins: tensors of NaN that take the place of results until something reads them.

A stand-in has the geometry of the result and no memory. An operator that needs no content follows
it; every other reader gets the real tensor, computed then. What can no longer be computed raises
``FusionError``; the call is not deferred from then on, so that the step can run again.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from daf.core.errors import FusionError
from daf.operators.fusion_table import CallSite, FusionTable
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.pytree import map_nest

# These read no content.
METADATA: frozenset[Any] = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.is_floating_point, Tensor.__len__),
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
    }
)
OUTLIVED = "its result outlived a step"
_UNFUSED = "run without fused operators (fused=False)"


class DefersResults:
    """What stand-ins need of a ``FusedOperator``; ``alone``: pattern of a call deferred no more."""

    alone: ClassVar[str] = ""

    def __init__(self) -> None:
        self.table = FusionTable()

    def follow(self, call: Any) -> Tensor | None:  # noqa: ARG002 - most defer nothing
        """Return the result of a call that reads a stand-in; None: it needs the real tensor."""
        return None

    def compute(self, deferred: "Deferred") -> Tensor:
        """Return the real tensor in place of a stand-in."""
        raise NotImplementedError

    def note_reader(self, site: CallSite, reader: str) -> None:
        """Note that ``reader`` needs the real tensor; unless expected, defer the site no more."""
        if self.table.pattern(site) != self.alone:
            self.table.decide(site, self.alone, f"its result was also read by {reader}")


@dataclass(eq=False)
class Deferred:
    """A result that is computed when something reads it.

    ``parts``: what it is made of; None once taken. ``reads``: its tensors, which must not change.
    """

    operator: DefersResults
    site: CallSite
    what: str
    parts: Any
    reads: tuple[Tensor, ...]
    result: Tensor | None = None

    def __post_init__(self) -> None:
        self._versions = self._present_versions()

    def check_unchanged(self, reader: str) -> None:
        """Check the parts; FusionError if one was changed in place since."""
        if self._present_versions() != self._versions:
            self._refuse(f"changed before {reader}")
            raise FusionError(
                f"what the fused {self.what} at {self.site.module!r} reads was changed in place "
                f"before {reader} ran, which no step before did; {_UNFUSED}"
            )

    def take(self, reader: str, *, keep: bool = False) -> Any:
        """Return the parts, kept only if ``keep``; FusionError: gone, or changed in place since."""
        if self.parts is None:
            self._refuse(f"its result is read after {reader}")
            raise FusionError(
                f"asked for the result of the {self.what} at {self.site.module!r} after "
                f"{reader}, which no step before did; its input is gone: {_UNFUSED}"
            )
        self.check_unchanged(reader)
        parts = self.parts
        if not keep:
            self.parts, self.reads, self._versions = None, (), ()
        return parts

    def _refuse(self, reason: str) -> None:
        self.operator.table.decide(self.site, self.operator.alone, reason)

    def _present_versions(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.reads)


class StandIns:
    """The stand-ins of one step, and what each stands for."""

    def __init__(self) -> None:
        self._deferred: MutableMapping[Tensor, Deferred] = WeakTensorKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._deferred)

    def make(self, deferred: Deferred, shape: Sequence[int], like: Tensor, dtype: Any) -> Tensor:
        """Return a tensor of NaN, of this shape and dtype on the device of ``like``."""
        with without_torch_function():
            nothing = torch.full((), torch.nan, dtype=dtype, device=like.device)
            stand_in = nothing.expand(shape)
        self._deferred[stand_in] = deferred
        return stand_in

    def find(self, tensor: Any) -> Deferred | None:
        """Return what a tensor stands for; None: it is a real one."""
        return self._deferred.get(tensor) if isinstance(tensor, Tensor) else None

    def change(self, stand_in: Tensor, deferred: Deferred) -> None:
        """Let a stand-in stand for this instead."""
        self._deferred[stand_in] = deferred

    def real(self, value: Any, reader: str) -> Any:
        """Return the value with real tensors in place of stand-ins, for ``reader``."""

        def compute(tensor: Tensor) -> Tensor:
            deferred = self._deferred.get(tensor)
            return tensor if deferred is None else self.compute(deferred, reader)

        return map_nest(Tensor, compute, value)

    def compute(self, deferred: Deferred, reader: str = "") -> Tensor:
        """Return the real tensor; ``reader``: an operator that may not have been expected."""
        if deferred.result is None:
            if reader:
                deferred.operator.note_reader(deferred.site, reader)
            with torch.enable_grad():
                deferred.result = deferred.operator.compute(deferred)
        return deferred.result

    def finish(self) -> None:
        """End the step: compute what lives, defer it no more; FusionError: that is impossible."""
        outlived = list(self._deferred.items())
        self._deferred.clear()
        for stand_in, deferred in outlived:
            operator = deferred.operator
            operator.table.decide(deferred.site, operator.alone, OUTLIVED)
            if deferred.result is None and deferred.parts is None:
                raise FusionError(
                    f"the result of the fused {deferred.what} at {deferred.site.module!r} "
                    "outlives the step, which no step before did; that tensor holds NaN. "
                    f"R{_UNFUSED[1:]}, or run the step again"
                )
            real = self.compute(deferred)
            with torch.enable_grad():
                torch.utils.swap_tensors(stand_in, real.view_as(real))  # type: ignore[no-untyped-call]
