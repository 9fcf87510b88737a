"""Two contestants stepped in turn with each other, where their ratios to plain's would decide.

Each ratio to plain's is taken at another time, and plain's own steps differ from time to time, by
a fifth on a machine with neighbours. Whoever is to be called faster runs beside the other.
"""

from __future__ import annotations

from daf_bench.harness.method_runner import Contender, Way
from daf_bench.harness.result import median_ratio
from daf_bench.harness.row_log import Row
from daf_bench.harness.subprocess_channel import ContestantError, TooLateError
from daf_bench.peers.row import check_time, run_in_turn, times, warmed_up
from daf_bench.peers.table import BASELINE, BASELINE_BITS, COMPARED_PERCENT, DAF_AT, DAF_BITS
from daf_bench.peers.verdicts import Rows, best_peer, ran


def pairs_of(rows: Rows) -> list[tuple[str, str]]:
    """One workload's: DAF at half of plain's peak and its best peer; DAF and the baseline's bits.

    Labels of contestants that were measured, DAF's first.
    """
    done = ran(rows)
    best = best_peer(done, COMPARED_PERCENT / 100)
    wanted = [
        (DAF_AT.format(COMPARED_PERCENT), best["contestant"] if best else ""),
        (DAF_BITS.format(BASELINE_BITS), BASELINE),
    ]
    labels = {row["contestant"] for row in done}
    return [pair for pair in wanted if labels.issuperset(pair)]


def measure_duel(ours: Way, theirs: Way, steps: int, until_s: float | None) -> Row:
    """Medians of both and of our step ÷ theirs; what could not be measured is told.

    Raises:
        TooLateError: the time was up, ``until_s``.
    """
    check_time(until_s, f"{ours.workload}, two beside each other")
    children = []
    try:
        for way in (ours, theirs):
            children.append(Contender(way))
            children[-1].until_s = until_s
        return _measured(children[0], children[1], steps)
    except TooLateError:
        raise
    except ContestantError as error:
        return {"failed": str(error)}
    finally:
        for child in children:
            child.end()


def _measured(ours: Contender, theirs: Contender, steps: int) -> Row:
    prepared = [child.prepare() for child in (ours, theirs)]
    refusals = [found["refusal"] for found in prepared if "refusal" in found]
    if refusals:
        return {"failed": refusals[0]}
    done_by_both = [warmed_up(child, steps) for child in (ours, theirs)]
    if not any("raised" in done[-1] for done in done_by_both):
        done_by_both = list(run_in_turn(ours, theirs, steps))
    refusals = [done[-1]["raised"] for done in done_by_both if "raised" in done[-1]]
    if refusals:
        return {"failed": refusals[0]}
    own, other = map(times, done_by_both)
    return {"own_ms": own, "other_ms": other, "ratio": median_ratio(own, other)}
