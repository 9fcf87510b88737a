"""The same updates by a host alone and within a budget at ``tolerance=0``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from daf_bench.harness.row_log import Row
from daf_bench.hosts.contestant import Contestant
from daf_bench.hosts.figures import share
from daf_bench.hosts.setting import Setting


def measure_exact(setting: Setting, report: Callable[[str], None]) -> Row:
    """Return floor, peaks, the budget, and how far apart the parameters end, or ``refused``."""
    folder = Path(setting.output)
    report("alone")
    plain = _trained(setting, folder / "plain", folder / "first")
    budget_bytes = share(plain["floor_bytes"], plain["peak_bytes"])
    row = {
        "floor_bytes": plain["floor_bytes"],
        "plain_peak_bytes": plain["peak_bytes"],
        "budget_bytes": budget_bytes,
    }
    report("within a budget, tolerance 0")
    exact = replace(setting, budget_bytes=budget_bytes, tolerance=0.0)
    ours = _trained(exact, folder / "ours")
    if "raised" in ours:
        return {**row, "refused": ours["raised"]}
    return {
        **row,
        "peak_bytes": ours["peak_bytes"],
        "updates": setting.updates,
        "sessions": ours["sessions"],
        "micro_batches": ours["micro_batches"],
        "reasons": ours["reasons"],
        "moved_apart": moved_apart(folder / "ours", folder / "plain", folder / "first"),
    }


def _trained(setting: Setting, after: Path, before: Path | None = None) -> Row:
    """Run all updates; the parameters are written before and after them."""
    child = Contestant(setting)
    try:
        if before is not None:
            child.write_weights(before)
        for _ in range(setting.updates):
            done = child.update()
            if "raised" in done:
                return done
        found = child.facts()
        child.write_weights(after)
        ended = child.finish()
        if "raised" in ended:
            return ended
        highest = max(found["peak_bytes"], ended["peak_bytes"])  # a session that ended is forgotten
        return {**found, "peak_bytes": highest}
    finally:
        child.end()


def moved_apart(ours: Path, plain: Path, first: Path) -> float:
    """Return |ours - plain| / |plain - first| of all parameters."""
    end, other, begin = (np.fromfile(path, np.float32) for path in (ours, plain, first))
    moved = np.linalg.norm(other.astype(np.float64) - begin)
    return float(np.linalg.norm(end.astype(np.float64) - other) / moved)
