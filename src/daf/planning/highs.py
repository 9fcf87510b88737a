"""Linear and mixed-integer programs in numpy arrays, solved by HiGHS.

HiGHS is called through highspy (why not SciPy: docs/planning.md). It prints nothing, starts no
threads, uses a fixed random seed, and releases the GIL while it solves.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from highspy import Highs

Floats = NDArray[np.float64]

_OPTIONS: dict[str, Any] = {"output_flag": False, "threads": 1, "parallel": "off", "random_seed": 0}
_LARGEST_COST = 1e9  # HiGHS fails on larger ones (seen at 1e12), so they are scaled down
_CONTINUOUS, _INTEGER = 0, 1  # HighsVarType
_ROW_WISE, _MINIMISE = 2, 1  # MatrixFormat, ObjSense


class Status(Enum):
    """How a solve ended."""

    SOLVED = "solved"  # within the gap asked for
    STOPPED = "stopped"  # at the node limit, with or without a solution
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class Answer:
    """The best amounts found, (columns,) or None; no amounts cost less than ``bound``."""

    status: Status
    amounts: Floats | None
    objective: float
    bound: float


class Rows:
    """``lower <= A x <= upper`` with ``A`` in compressed sparse rows.

    Row ``r`` has the values ``value[start[r]:start[r + 1]]`` (float64) in the columns
    ``column[start[r]:start[r + 1]]`` (int32); ``lower`` and ``upper`` are (rows,) float64.
    """

    def __init__(
        self,
        row: ArrayLike,
        column: ArrayLike,
        value: ArrayLike,
        *,
        lower: ArrayLike,
        upper: ArrayLike,
        count: int,
    ) -> None:
        """Make ``count`` rows of (row, column, value) entries, in any order, no two alike."""
        place = np.asarray(row, dtype=np.intp)
        order = np.argsort(place, kind="stable")
        ends = np.cumsum(np.bincount(place, minlength=count))
        self.start = np.concatenate([[0], ends]).astype(np.int32)
        self.column = np.asarray(column)[order].astype(np.int32)
        self.value = np.broadcast_to(np.asarray(value, dtype=np.float64), place.shape)[order]
        self.lower = np.full(count, lower, dtype=np.float64)
        self.upper = np.full(count, upper, dtype=np.float64)

    @classmethod
    def of_dense(cls, matrix: Floats, *, lower: ArrayLike, upper: ArrayLike) -> "Rows":
        """Make rows of the non-zero entries of a (rows, columns) matrix."""
        row, column = np.nonzero(matrix)
        return cls(row, column, matrix[row, column], lower=lower, upper=upper, count=len(matrix))


class LinearProgram:
    """``min cost @ x, 0 <= x <= upper``; rows may be added between solves, which start warm."""

    def __init__(self, cost: Floats, upper: Floats, fixed: float = 0.0) -> None:
        """Take (columns,) costs and bounds, and a fixed cost; raises ValueError if unbounded."""
        if np.any((cost < 0) & np.isinf(upper)):
            raise ValueError("a column without an upper bound has a negative cost")
        self._columns = np.arange(len(cost), dtype=np.int32)
        self._scale = min(1.0, _LARGEST_COST / max(1.0, float(np.abs(cost).max(initial=0.0))))
        self._highs = _quiet_highs()()
        for name, value in _OPTIONS.items():
            self._highs.setOptionValue(name, value)
        nothing, none = np.zeros(0), np.zeros(0, dtype=np.int32)
        kinds = np.full(len(cost), _CONTINUOUS, dtype=np.int32)
        size = (len(cost), 0, 0, _ROW_WISE, _MINIMISE, self._scale * fixed)
        columns = self._scale * cost, np.zeros(len(cost)), upper
        self._highs.passModel(
            *size, *columns, nothing, nothing, np.zeros(1, np.int32), none, nothing, kinds
        )

    def __len__(self) -> int:
        return len(self._columns)

    def add_rows(self, rows: Rows) -> int:
        """Add rows; return the number of the first."""
        first = self._highs.getNumRow()
        matrix = len(rows.value), rows.start[:-1], rows.column, rows.value
        self._highs.addRows(len(rows.lower), rows.lower, rows.upper, *matrix)
        return int(first)

    def bound_row(self, row: int, upper: float) -> None:
        """Give a row another upper bound and no lower one."""
        self._highs.changeRowBounds(row, -np.inf, upper)

    def solve(
        self, *, whole: NDArray[np.bool_] | None = None, relative_gap: float = 0.0, most_nodes: int
    ) -> Answer:
        """Return the least cost; columns marked in ``whole`` (columns,) take integers only."""
        highs = self._highs
        kinds = np.full(len(self._columns), _CONTINUOUS, dtype=np.uint8)
        if whole is not None:
            kinds[whole] = _INTEGER
        highs.changeColsIntegrality(len(kinds), self._columns, kinds)
        highs.setOptionValue("mip_rel_gap", relative_gap)
        highs.setOptionValue("mip_max_nodes", most_nodes)
        _run(highs)
        found, scale = _answer(highs, mixed=whole is not None), self._scale
        return replace(found, objective=found.objective / scale, bound=found.bound / scale)


@cache
def _quiet_highs() -> "type[Highs]":
    from highspy import Highs  # 4 MB, only for processes that plan

    class QuietHighs(Highs):
        """HiGHS silenced before callbacks are enabled, which prints a banner since 1.16."""

        def enableCallbacks(self) -> None:  # noqa: N802
            self.silent()
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    return QuietHighs


def _run(highs: "Highs") -> None:
    """Solve; leave the calling thread's scheduler unchanged."""
    from highspy import HighsStatus

    if highs.run() != HighsStatus.kError:
        highs.resetGlobalScheduler(True)
        return
    # The caller runs HiGHS with other threads; 0 accepts the existing scheduler.
    highs.setOptionValue("threads", 0)
    if highs.run() == HighsStatus.kError:
        raise RuntimeError(f"HiGHS {highs.version()} failed to solve a program")
    highs.setOptionValue("threads", _OPTIONS["threads"])


def _answer(highs: "Highs", *, mixed: bool) -> Answer:
    from highspy import HighsModelStatus, kSolutionStatusFeasible

    ended, info = highs.getModelStatus(), highs.getInfo()
    if ended == HighsModelStatus.kInfeasible:
        return Answer(Status.INFEASIBLE, None, np.inf, np.inf)
    status = Status.SOLVED if ended == HighsModelStatus.kOptimal else Status.STOPPED
    bound = float(info.mip_dual_bound if mixed else info.objective_function_value)
    if int(info.primal_solution_status) != int(kSolutionStatusFeasible):
        return Answer(status, None, np.inf, bound if mixed else -np.inf)
    amounts = np.array(highs.getSolution().col_value)
    return Answer(status, amounts, float(info.objective_function_value), bound)
