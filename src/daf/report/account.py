"""The account of a run's peak, as the bars of a waterfall chart."""

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
    """One bar of a waterfall; ``kind`` is term, floor, predicted, measured or plain."""

    words: str
    kind: str
    start_bytes: int
    end_bytes: int

    @property
    def nbytes(self) -> int:
        """The bar's length; negative for a term that corrects those before it."""
        return self.end_bytes - self.start_bytes


def waterfall(run: Run) -> list[Bar]:
    """Return the predicted terms stacked, then the predicted (if any) and the measured peak."""
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
