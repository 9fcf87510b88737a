"""What a step did: the ledger of saved bytes; one report for each site and each fused operator."""

from __future__ import annotations

from dataclasses import dataclass

from daf.core.policy import Need, Site, Treatment


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """What the saved tensors of one step cost (bytes).

    ``plain``: what autograd would hold, deduplicated by storage, without
    parameters, buffers and the caller's batch. ``held``: what is held
    instead, headers and padding included, and of a pool also its free pages,
    page tables and records; inputs of replayed calls, and what a replay rebuilt until
    backward has read it. Peaks are over the step. ``evicted``: planes that
    the pool gave up in the step, under its cap or the process's limit, and
    their bytes. ``spilled``: on disk, or of a GPU's codes in host memory, now and at most in the
    step; what is on its way there, or read back before it is wanted, counts as held.
    """

    plain_bytes: int
    plain_peak_bytes: int
    held_bytes: int
    held_peak_bytes: int
    sites: int
    evicted_planes: int = 0
    evicted_bytes: int = 0
    spilled_bytes: int = 0
    spilled_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What was done at one site in the last step (bytes; each byte is told at one site only).

    ``treatment`` is what was really done, which is *keep* where the policy's
    own treatment could not be applied soundly. ``held_bytes`` is as it was when
    the tensor was saved; ``evicted_bytes`` of that were given up since, as far
    as the pool's list reached. ``spilled_bytes`` went to disk, or from a GPU to the host.
    """

    site: Site
    need: Need
    treatment: Treatment
    plain_bytes: int
    held_bytes: int
    evicted_bytes: int = 0
    spilled_bytes: int = 0

    def as_dict(self) -> dict[str, str | int]:
        """One row of plain values, for tables and JSON."""
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
    """Whether an operator is fused (with what follows it), and as what, or why not.

    ``module``, ``call`` and ``operator`` are those of its :class:`Site`; ``pattern`` is empty
    where it stays as it is; ``reason`` says why no more of what follows it is fused.
    """

    module: str
    call: int
    pattern: str
    reason: str
    operator: str = "batch_norm"
