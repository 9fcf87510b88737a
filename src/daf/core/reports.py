"""Reports of a step: the ledger of saved bytes, each site and each fused operator."""

from __future__ import annotations

from dataclasses import dataclass

from daf.core.policy import Need, Site, Treatment


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
