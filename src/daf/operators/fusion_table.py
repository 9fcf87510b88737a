"""The decisions of a fused operator for each call, from step to step."""

from collections.abc import Iterable
from typing import NamedTuple

from daf.core.reports import FusionReport


class CallSite(NamedTuple):
    """The ``call``-th call of ``operator`` within one call of the module at this path."""

    module: str
    operator: str
    call: int


class FusionTable:
    """The decisions for each call of an operator, from step to step."""

    def __init__(self) -> None:
        self._decided: dict[CallSite, FusionReport] = {}
        self._objections: dict[CallSite, FusionReport] = {}
        self._deferred: set[CallSite] = set()
        self._fallen_back: set[CallSite] = set()

    def reports(self) -> tuple[FusionReport, ...]:
        """Return every call seen; one that the last step refused has the reason."""
        return tuple((self._decided | self._objections).values())

    def fallen_back(self) -> tuple[FusionReport, ...]:
        """Return the calls that were deferred, and are no more."""
        return tuple(self._decided[site] for site in self._fallen_back)

    def is_open(self, site: CallSite) -> bool:
        """True if nothing is decided for the site."""
        return site not in self._decided

    def is_deferred(self, site: CallSite) -> bool:
        """True if a stand-in takes the place of the site's result."""
        return site in self._deferred

    @property
    def defers(self) -> bool:
        """True if stand-ins take the place of any results."""
        return bool(self._deferred)

    def pattern(self, site: CallSite) -> str:
        """Return what the site is fused with; empty where PyTorch's own runs."""
        return self._decided[site].pattern

    def decide(
        self, site: CallSite, pattern: str, reason: str = "", *, deferred: bool = False
    ) -> None:
        """Let the site run so from the next step on; ``reason``: why no more is fused."""
        if site in self._deferred and not deferred:
            self._fallen_back.add(site)
        (self._deferred.add if deferred else self._deferred.discard)(site)
        self._decided[site] = _report(site, pattern, reason)

    def stop_deferring(self, pattern: str, reason: str) -> bool:
        """Let deferred sites run as ``pattern`` from the next step on; False: there are none."""
        deferred = list(self._deferred)
        for site in deferred:
            self.decide(site, pattern, reason)
        return bool(deferred)

    def object(self, reasons: Iterable[tuple[CallSite, str]]) -> None:
        """Note why calls of this step ran as PyTorch's own, instead of those of the step before."""
        self._objections = {site: _report(site, "", reason) for site, reason in reasons}


def _report(site: CallSite, pattern: str, reason: str) -> FusionReport:
    return FusionReport(site.module, site.call, pattern, reason, site.operator)
