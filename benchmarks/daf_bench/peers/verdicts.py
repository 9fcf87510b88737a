"""A side-by-side in words: who is fastest, who smallest, and wherever a peer beats DAF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]
OURS = "daf"  # a row's ``kind`` where DAF chose what to do
# Where two contestants were stepped in turn with each other: ``contestant``'s step ÷ that of
# ``against`` is its ``ratio``.
DUEL = "duel"
Duels = Mapping[tuple[str, str, str], float]


def ran(rows: Rows) -> list[Row]:
    """Those that were measured."""
    return [row for row in rows if "step_ratio" in row]


def workloads_of(rows: Rows) -> dict[str, list[Row]]:
    """Contestants' rows by workload, both in their order."""
    rows = [row for row in rows if row["kind"] != DUEL]
    names = dict.fromkeys(row["workload"] for row in rows)
    return {name: [row for row in rows if row["workload"] == name] for name in names}


def duels_of(rows: Rows) -> Duels:
    """Ratios of step times by workload, contestant, and whom it was stepped in turn with."""
    return {
        (row["workload"], row["contestant"], row["against"]): row["ratio"]
        for row in rows
        if row["kind"] == DUEL and "ratio" in row
    }


def best_peer(rows: Rows, share: float) -> Row | None:
    """Of one workload's peers that compute what plain does, the fastest within a share of its peak.

    If none is within it, the smallest.
    """
    peers = _peers(ran(rows))
    within = [row for row in peers if row["peak_ratio"] <= share]
    if within:
        return min(within, key=_time)
    return min(peers, key=lambda row: float(row["peak_ratio"]), default=None)


def losses(rows: Rows) -> list[str]:
    """Where peers beat DAF, over all workloads; what is nowhere so is said too.

    Under a budget a peer wins that stays within it and is faster, or that trains where DAF
    does not. Without one, a peer that is both smaller and faster. Where the two were stepped in
    turn with each other as well, that is said too, and decides.
    """
    duels = duels_of(rows)
    found = [
        sentence
        for name, own in workloads_of(rows).items()
        for row in own
        if row["kind"] == OURS
        for sentence in _lost(name, row, own, duels)
    ]
    return found or ["No peer that computes what plain does beats DAF anywhere in these tables."]


def verdicts(rows: Rows) -> list[str]:
    """One workload: who is fastest, who smallest, who beats each run of DAF, who did not run."""
    done = ran(rows)
    sentences = _extremes(done) if done else []
    peers = [row for row in done if row["kind"] != OURS]
    sentences += [_beside_peers(row, peers) for row in done if row["kind"] == OURS]
    sentences += [
        f"{row['contestant']} did not run: {why_not(row)}." for row in rows if row not in done
    ]
    return sentences


def why_not(row: Row) -> str:
    """Why a contestant has no figures."""
    reason = row.get("refused") or row.get("failed") or row["late"]
    return str(reason).rstrip(".")


def _extremes(done: Rows) -> list[str]:
    fastest = min(done, key=_time)
    smallest = min(done, key=lambda row: float(row["peak_ratio"]))
    return [
        f"Fastest: {fastest['contestant']}, {fastest['step_ratio']:.2f} × plain's step at "
        f"{fastest['peak_ratio']:.2f} × its peak.",
        f"Smallest: {smallest['contestant']}, {smallest['peak_ratio']:.2f} × plain's peak at "
        f"{smallest['step_ratio']:.2f} × its step.",
    ]


def _lost(workload: str, ours: Row, rows: Rows, duels: Duels) -> list[str]:
    peers = _peers(ran(rows))
    if "late" in ours:
        return []
    if "step_ratio" not in ours:
        share = _share(ours)
        fits = [row for row in peers if share is not None and row["peak_ratio"] <= share]
        if not fits:
            return []
        best = min(fits, key=_time)
        return [f"{workload}: {ours['contestant']} does not train, and {_told(best)} does."]
    limit = _share(ours) or ours["peak_ratio"]
    sentences = []
    for row in sorted((row for row in peers if row["peak_ratio"] <= limit), key=_time):
        ratio = duels.get((workload, ours["contestant"], row["contestant"]))
        seems = _time(row) < _time(ours)
        beats = seems if ratio is None else ratio > 1
        if seems or beats:
            verb = "beats" if beats else "seems to beat"
            sentences.append(f"{workload}: {_told(row)} {verb} {_told(ours)}{_beside(ratio)}.")
        if beats:
            break  # the fastest says enough
    return sentences


def _beside(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f", whose step is {ratio:.2f} × the peer's when these two are stepped in turn"


def _share(row: Row) -> float | None:
    return None if row["percent"] is None else float(row["percent"]) / 100


def _told(row: Row) -> str:
    error = row["gradient_error"]
    errs = "" if error is None else f", gradient error {error:.2g}"
    return (
        f"“{row['contestant']}” ({row['step_ratio']:.2f} × plain's step, "
        f"{row['peak_ratio']:.2f} × its peak{errs})"
    )


def _peers(done: Rows) -> list[Row]:
    return [row for row in done if row["kind"] != OURS and row["same_mathematics"]]


def _beside_peers(ours: Row, peers: Rows) -> str:
    faster = [row for row in peers if _time(row) < _time(ours)]
    smaller = [row for row in peers if row["peak_ratio"] < ours["peak_ratio"]]
    both = [row for row in faster if row in smaller]
    return (
        f"Beside {ours['contestant']}: faster {_listed(faster)}; smaller {_listed(smaller)}; "
        f"both {_listed(both)}."
    )


def _listed(rows: Rows) -> str:
    names = [
        f"“{row['contestant']}”" + ("" if row["same_mathematics"] else " (another computation)")
        for row in rows
    ]
    if not names:
        return "is nobody"
    if len(names) == 1:
        return f"is {names[0]}"
    return f"are {', '.join(names[:-1])} and {names[-1]}"


def _time(row: Row) -> float:
    return float(row["step_ratio"])
