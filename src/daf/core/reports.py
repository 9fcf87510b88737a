"""Reports of a step: the ledger of saved bytes, each site and each fused operator."""

from dataclasses import dataclass
from typing import Any

from daf.core.json_dataclasses import to_plain
from daf.core.notebook import Part, card, facts, memory_bar, optional_bytes
from daf.core.policy import KEEP, Need, Site, Treatment
from daf.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """The bytes of one step's saved tensors; peaks are over the step.

    ``held``: with headers, padding, a pool's free pages, page tables and records, inputs of
    replayed calls, and rebuilt tensors until read. What is in transit counts as held.
    """

    plain_bytes: int  # what autograd would hold, beside parameters, buffers and the batch
    plain_peak_bytes: int
    held_bytes: int
    held_peak_bytes: int
    sites: int
    evicted_planes: int = 0  # under the pool's cap or the process's limit
    evicted_bytes: int = 0
    spilled_bytes: int = 0  # on disk, or a GPU's codes in host memory
    spilled_peak_bytes: int = 0

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what is held beside what plain PyTorch would hold."""
        held, plain = self.held_peak_bytes, self.plain_peak_bytes
        parts = [Part("held at the peak", held), Part("not held", max(0, plain - held))]
        known = {
            "plain PyTorch": format_bytes(plain),
            "times fewer bytes": f"{plain / held:.2f}" if held else None,
            "saved tensors": self.sites,
            "evicted": optional_bytes(self.evicted_bytes or None),
            "on disk, or on the host": optional_bytes(self.spilled_peak_bytes or None),
        }
        return card("Saved for backward", memory_bar(parts), facts(known))


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What was done at one site in the last step (bytes; each counts at one site only)."""

    site: Site
    need: Need
    treatment: Treatment  # the one applied, *keep* where the policy's own was unsound
    plain_bytes: int
    held_bytes: int  # at the time of the save
    evicted_bytes: int = 0  # of these, since then, as far as the pool's list reached
    spilled_bytes: int = 0  # moved to disk, or from a GPU to the host

    def as_dict(self) -> dict[str, str | int]:
        """Return one row of plain values, for tables and JSON."""
        return {
            "site": str(self.site),
            "need": self.need.value,
            "method": self.treatment.method.value,
            "bits": self.treatment.bits,
            "plain_bytes": self.plain_bytes,
            "held_bytes": self.held_bytes,
            "evicted_bytes": self.evicted_bytes,
            "spilled_bytes": self.spilled_bytes,
        }


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Whether and how an operator, named as in its :class:`Site`, is fused with what follows it."""

    module: str
    call: int
    pattern: str  # empty if not fused
    reason: str  # why no more of what follows is fused
    operator: str = "batch_norm"


@dataclass(frozen=True, slots=True)
class LeverRefusal:
    """A lever left alone: nothing has proven that it changes nothing, or it was forbidden."""

    lever: str  # "splitting", "replay", "fusion" or "release"
    modules: tuple[str, ...]  # their paths; empty for the whole step
    reason: str
    saved_bytes: int | None  # by which the least budget would be lower; None: unknown

    def __str__(self) -> str:
        where = f" of {', '.join(self.modules)}" if self.modules else ""
        saved = f"; it would lower the least budget by {format_bytes(self.saved_bytes or 0)}"
        return f"{self.lever}{where}: {self.reason}{saved if self.saved_bytes else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Return one row of plain values, for tables and JSON."""
        return dict(to_plain(self))

    def as_site(self) -> dict[str, Any]:
        """Return the same with the columns of a ``SiteReport``."""
        site = Site(", ".join(self.modules), self.lever, 0, 0)
        columns = SiteReport(site, Need.EXACT, KEEP, 0, 0).as_dict() | {"method": "left alone"}
        return columns | {"reason": self.reason, "saved_bytes": self.saved_bytes}
