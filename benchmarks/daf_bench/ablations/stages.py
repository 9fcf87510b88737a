"""The stages of both papers' ablations: what a capture does, where codes lie, how ranges are found.

SAGE's come one after another, each with those before it. DAF's differ from the whole in one
mechanism each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from daf.codecs import ranges
from daf.core.policy import (
    Method,
    Need,
    Policy,
    Treatment,
    coded_policy,
    exact_policy,
    with_fused_operators,
)
from daf.core.replaced import replaced
from daf.kernels.autotune import Chooser
from daf.pool.paged_pool import make_store
from daf.pool.store import PlainStore, Store
from daf_bench.ablations.best_fit import BestFitStore
from daf_bench.ablations.staged_codec import staged

BITS = 4  # of the published codes: two diverge
_VALUES = (Need.LINEAR, Need.NORM, Need.PRODUCT)


def _pool() -> Store:
    return make_store(None)


@dataclass(frozen=True, slots=True)
class Stage:
    """``policy`` makes what a capture does; ``strategy``: of ranges, None: the measured choice."""

    policy: Callable[[], Policy]
    make_store: Callable[[], Store] = _pool
    strategy: str | None = None

    def choosing(self) -> AbstractContextManager[Any]:
        """The context of a step, in which ranges are found that way."""
        if self.strategy is None:
            return nullcontext()
        found = ranges.Ranges(None, _always(self.strategy))
        return replaced(ranges, ours=lambda: found)


def _always(strategy: str) -> type[Chooser]:
    class Fixed(Chooser):
        def choose(self, shape_class: str, trial: Any) -> str:  # noqa: ARG002
            return strategy

    return Fixed


def _fused(*, recomputes: bool, chunked: bool) -> Policy:
    return replace(with_fused_operators(exact_policy(), chunked=chunked), recomputes=recomputes)


def _published(code: Treatment | None = None) -> Policy:
    """Codes of each tensor's range, as DAF was published; ``code``: another of the same bits."""
    code = code or Treatment(Method.RANGED, BITS)
    by_need = dict(coded_policy(BITS).by_need) | dict.fromkeys(_VALUES, code)
    return Policy("published", MappingProxyType(by_need))


SAGE: Mapping[str, Stage] = MappingProxyType(
    {
        "separation": Stage(exact_policy),
        "fusion": Stage(lambda: _fused(recomputes=False, chunked=False)),
        "reduction": Stage(lambda: _fused(recomputes=True, chunked=False)),
        "operator memory": Stage(lambda: _fused(recomputes=True, chunked=True)),
    }
)
DAF: Mapping[str, Stage] = MappingProxyType(
    {
        "as published": Stage(_published, strategy="hybrid"),
        "ranges by tree": Stage(_published, strategy="tree"),
        "staged packing": Stage(lambda: _published(staged(BITS)), strategy="hybrid"),
        "codes in malloc": Stage(_published, PlainStore, "hybrid"),
        "codes by best fit": Stage(_published, BestFitStore, "hybrid"),
    }
)
STAGES: Mapping[str, Stage] = MappingProxyType({**SAGE, **DAF})
