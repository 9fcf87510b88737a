"""Every mechanism, figure, baseline, job and open question of DAF and SAGE, a row for each."""

from __future__ import annotations

from daf_bench.papers import daf_rows, sage_rows
from daf_bench.papers.row import PaperRow

ROWS: tuple[PaperRow, ...] = (*daf_rows.ROWS, *sage_rows.ROWS)
