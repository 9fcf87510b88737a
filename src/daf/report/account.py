"""The account of a run's peak, term by term: the steps of a waterfall."""

from __future__ import annotations

from dataclasses import dataclass

from daf.report.runs import Run

# Every term of ``Plan.account``, in its order.
TERMS = {
    "floor": "floor: Python, libraries, data",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "saved": "saved for backward",
    "beside_the_model": "buffers and the like",
    "transient": "transient",
    "margin": "margin for what is not foreseen",
}
_TOTALS = ("predicted_peak",)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar from ``start_bytes`` to ``end_bytes``; a ``total`` stands on the ground.

    ``kind`` is ``term``, ``floor``, ``predicted``, ``measured`` or ``plain``.
    """

    words: str
    kind: str
    start_bytes: int
    end_bytes: int

    @property
    def nbytes(self) -> int:
        """How much the term adds; negative where the terms before it were too many."""
        return self.end_bytes - self.start_bytes


def waterfall(run: Run) -> list[Bar]:
    """The predicted terms one on top of the other, then the predicted and the measured peak.

    A run without a budget predicts nothing: its bars are the floor and the measured peak.
    """
    account = (run.plan or {}).get("account") or {"floor": run.summary["floor_bytes"]}
    bars, level = [], 0
    for name, nbytes in account.items():
        if name not in _TOTALS:
            kind = "floor" if name == "floor" else "term"
            bars.append(Bar(TERMS.get(name, name.replace("_", " ")), kind, level, level + nbytes))
            level += nbytes
    predicted = run.summary["predicted_peak_bytes"]
    if predicted:
        bars.append(Bar("predicted before step 1", "predicted", 0, predicted))
    return [*bars, Bar("measured peak", "measured", 0, run.summary["peak_bytes"])]
